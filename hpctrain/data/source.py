"""What a loader can read: the one small protocol between data and loaders, and arrays as a source.

Two kinds. *Random access* (arrays, memory maps, files, one copy per node): any rank can take any
sample, so every epoch has a new global order on any number of ranks. *Scattered* (every rank holds
only its share): the shares follow the epoch's order cyclically, and a new order is an exchange.

A batch is a tree: arrays or tensors, alone or in tuples, lists and dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from hpctrain.data.partition import Indices, split
from hpctrain.data.shuffle import Order, choose_kind
from hpctrain.errors import ConfigError

__all__ = [
    "ArraySource",
    "Batch",
    "Scattered",
    "Source",
    "SubsetSource",
    "as_tensor",
    "is_arrays",
    "leaves",
    "map_leaves",
    "split_source",
]


Batch: TypeAlias = Any
"""Tensors or arrays whose first axis is the samples, alone or in tuples, lists and dicts."""


@runtime_checkable
class Source(Protocol):
    """Random access: every rank can take every sample.

    `take` is called from a loader's thread, one call at a time, and draws no random numbers.
    """

    def __len__(self) -> int:
        """How many samples there are; the same on every rank."""

    def take(self, indices: Indices) -> Batch:
        """These samples, in this order, as one batch: one gather of rows. No index is an error.

        The batch belongs to the caller; no indices give a batch of no rows.
        """


@runtime_checkable
class Scattered(Protocol):
    """Every rank holds only its share: row i of rank r is position `i * size + r` of the order.

    So "k samples consumed" means the same set of samples on every number of ranks.
    """

    @property
    def order(self) -> Order:
        """What the shares follow now; the same on every rank."""

    def __len__(self) -> int:
        """How many samples there are over all ranks; the same on every rank."""

    def take(self, rows: Indices) -> Batch:
        """These rows of this rank's share, as one batch; as `Source.take` otherwise."""

    def reorder(self, order: Order) -> None:
        """Collective: exchange samples until the shares follow `order`, which must match."""


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with every leaf replaced; tuples stay named, and mappings become dicts."""
    if isinstance(tree, tuple):
        parts = [map_leaves(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [map_leaves(function, part) for part in tree]
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, part) for key, part in tree.items()}
    return function(tree)


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with a name that says where it is, such as `[0]['image']`."""
    if isinstance(tree, tuple | list):
        for number, part in enumerate(tree):
            yield from leaves(part, f"{name}[{number}]")
    elif isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from leaves(part, f"{name}[{key!r}]")
    else:
        yield name, tree


def as_tensor(leaf: Any) -> Any:
    """Sources give arrays or tensors; users get tensors if torch has the dtype."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    try:
        return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    except TypeError:
        return leaf


_Reader = Callable[[Indices], Any]
# Torch has these, numpy does not: rows are sent as integers of the same width.
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_arrays(data: object) -> bool:
    """Whether this is arrays or tensors, alone or in tuples and dicts. Pure.

    A list is a data set of samples, as in torch.
    """
    if isinstance(data, list):
        return False
    found = [leaf for _, leaf in leaves(data)]
    return bool(found) and all(isinstance(leaf, np.ndarray | torch.Tensor) for leaf in found)


class ArraySource:
    """Samples in numpy arrays (memory maps too) or torch tensors whose first axis they share.

    Batches have the structure of the data, with tensors if torch has the dtype.
    """

    def __init__(self, data: Any) -> None:
        sizes = {name or "the array": _num_rows(name, leaf) for name, leaf in leaves(data)}
        if not sizes:
            raise ConfigError("the data have no arrays in them")
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise ConfigError(f"the arrays have different numbers of samples: {listed}")
        self._num_samples = next(iter(sizes.values()))
        self._readers = map_leaves(_reader_of, data)
        self._alone = self._readers if callable(self._readers) else None
        flat = isinstance(self._readers, tuple) and all(map(callable, self._readers))
        self._flat = self._readers if flat and type(self._readers) is tuple else None
        found = [leaf for _, leaf in leaves(data)]
        self.bytes_per_sample = sum(map(_row_bytes, found))
        self.is_in_memory = not any(_is_mapped(leaf) for leaf in found)

    def __len__(self) -> int:
        return self._num_samples

    def take(self, indices: Indices) -> Batch:
        """These samples as one batch."""
        if self._flat is not None:  # by far the most usual: a tuple of arrays
            return tuple([read(indices) for read in self._flat])
        if self._alone is not None:
            return self._alone(indices)
        return map_leaves(lambda read: read(indices), self._readers)


def _num_rows(name: str, leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
        raise ConfigError(f"data{name} is a sparse tensor; give a dense one")
    if len(getattr(leaf, "shape", ())) == 0:
        raise ConfigError(
            f"data{name} is {type(leaf).__name__} without an axis of samples; give arrays or "
            "tensors whose first axis is the samples"
        )
    return int(leaf.shape[0])


def _row_bytes(leaf: np.ndarray[Any, Any] | torch.Tensor) -> int:
    return leaf.nbytes // max(1, leaf.shape[0])


def _is_mapped(leaf: object) -> bool:
    """Whether this is a memory map or a view of one."""
    while leaf is not None and not isinstance(leaf, np.memmap):
        leaf = leaf.base if isinstance(leaf, np.ndarray) else None
    return leaf is not None


def _reader_of(leaf: np.ndarray[Any, Any] | torch.Tensor) -> _Reader:
    """What gathers rows of one array."""
    if not isinstance(leaf, torch.Tensor):
        return _numpy_reader(np.asarray(leaf))
    tensor = leaf.detach()
    if tensor.device.type != "cpu":
        return lambda indices: tensor[torch.from_numpy(indices.copy()).to(tensor.device)]
    try:
        return _numpy_reader(tensor.numpy())
    except TypeError:  # bfloat16 and similar
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        whole = _numpy_reader(tensor.view(_AS_INTEGERS[tensor.element_size()]).numpy())
        return lambda indices: whole(indices).view(tensor.dtype)


def _numpy_reader(array: np.ndarray[Any, Any]) -> _Reader:
    if not _torch_has(array.dtype):
        return lambda indices: array[indices]
    native = array.dtype.newbyteorder("=")
    wrap = torch.from_numpy
    if array.flags.c_contiguous and array.flags.aligned and array.dtype == native:
        take = array.take
        return lambda indices: wrap(take(indices, 0))
    # `take` would first copy the whole array into order; fancy indexing reads only the rows
    return lambda indices: wrap(np.ascontiguousarray(array[indices], dtype=native))


def _torch_has(dtype: np.dtype[Any]) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype=dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


class SubsetSource:
    """These samples of a source: positions of an order, or any indices."""

    def __init__(self, source: Source, chosen: Indices | range, order: Order | None = None) -> None:
        first, last = _ends(chosen)
        if first < 0 or last >= len(source):
            raise ConfigError(
                f"samples from {first} to {last} are not all from 0 to {len(source) - 1}"
            )
        self._source = source
        self._chosen = chosen
        self._order = order
        self.bytes_per_sample: int | None = getattr(source, "bytes_per_sample", None)
        self.is_in_memory: bool = getattr(source, "is_in_memory", False)

    def __len__(self) -> int:
        return len(self._chosen)

    def take(self, indices: Indices) -> Batch:
        """These samples of the chosen ones."""
        if isinstance(self._chosen, range):
            rows = self._chosen.start + indices * self._chosen.step
        else:
            rows = self._chosen[indices]
        return self._source.take(rows if self._order is None else self._order.at(rows))


def _ends(chosen: Indices | range) -> tuple[int, int]:
    if len(chosen) == 0:
        return 0, -1
    if isinstance(chosen, range):
        return min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1])
    return int(chosen.min()), int(chosen.max())


def split_source(
    source: Source, sizes: Mapping[str, float], *, seed: int | None
) -> dict[str, SubsetSource]:
    """Split into named parts that never overlap, such as train, validation and test.

    Args:
        source: What to split.
        sizes: Counts or fractions by name, as in `partition.split`.
        seed: Shuffle before splitting, the same on every rank and in every run with this seed;
            None cuts the data in their own order.
    """
    num = len(source)
    order = None
    if seed is not None:
        order = Order(kind=choose_kind(num), num_samples=num, seed=seed, epoch=0)
    return {name: SubsetSource(source, part, order) for name, part in split(num, sizes).items()}
