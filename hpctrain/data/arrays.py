"""Arrays as a source: a batch is one gather of rows, with no Python per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hpctrain.data.source import Batch, Indices
from hpctrain.data.structure import leaves, map_leaves
from hpctrain.errors import ConfigError

__all__ = ["ArraySource", "is_arrays"]

_Reader = Callable[[Indices], Any]
# Torch has these, numpy has not: rows travel as whole numbers of the same width.
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

    Batches have the structure of the data, with tensors wherever torch has the dtype.
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
    except TypeError:  # bfloat16 and its kin
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
