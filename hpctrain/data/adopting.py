"""Whatever a user hands over, as a source that batches or rows are read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from hpctrain.data.mapped import Collate, MapSource
from hpctrain.data.source import ArraySource, Scattered, Source, SubsetSource, is_arrays
from hpctrain.data.stream import Stream
from hpctrain.data.table import Table
from hpctrain.errors import ConfigError

__all__ = ["Adopted", "SourceRows", "adopt", "as_source", "is_columns", "is_stream", "rows_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopted:
    """What a user's DataLoader says, for whatever the loader's own arguments leave open."""

    dataset: Any
    global_batch: int | None = None
    rank_batch: int | None = None
    """The batch size of a DataLoader whose DistributedSampler makes it that of one rank."""
    shuffle: bool | None = None
    drop_last: bool = False
    num_workers: int = 0
    prefetch: int | None = None
    timeout_s: float = 0.0
    collate: Collate | None = None
    initialize: Any = None
    sample_weights: Any = None
    num_draws: int | None = None
    start_method: str | None = None


def adopt(data: Any) -> Adopted:
    """Take a DataLoader apart; anything else is a data set.

    Its batch size is the global batch, as it is on one process.

    Raises:
        ConfigError: it has an order or batches of its own, which cannot be dealt out unseen.
    """
    if not isinstance(data, DataLoader):
        return Adopted(dataset=data)
    batch = data.batch_size
    rank_batch: int | None = None
    shuffle: bool | None = None
    if not isinstance(data.dataset, IterableDataset):
        if batch is None or type(data.batch_sampler) is not BatchSampler:
            raise ConfigError(
                "a DataLoader with a batch_sampler of its own, or without batches, cannot be "
                "divided over ranks; pass its data set, and global_batch"
            )
        shuffle = None if _is_weighted(data.sampler) else _shuffle_of(data.sampler)
        if isinstance(data.sampler, DistributedSampler):
            batch, rank_batch = None, batch
    sampler: Any = None if isinstance(data.dataset, IterableDataset) else data.sampler
    weighted = _is_weighted(sampler)
    return Adopted(
        dataset=data.dataset,
        sample_weights=sampler.weights if weighted else None,
        num_draws=sampler.num_samples if weighted else None,
        global_batch=batch,
        rank_batch=rank_batch,
        shuffle=shuffle,
        drop_last=data.drop_last,
        num_workers=data.num_workers,
        prefetch=data.prefetch_factor,
        timeout_s=data.timeout,
        collate=None if data.collate_fn is default_collate else data.collate_fn,
        start_method=_start_method(data.multiprocessing_context),
        initialize=data.worker_init_fn,
    )


def _start_method(context: Any) -> str | None:
    """How it would start workers, if that is possible with MPI; a fork is not."""
    method = None if context is None else context.get_start_method()
    if method == "fork":
        raise ConfigError(
            "a DataLoader with multiprocessing_context='fork' cannot be used with MPI; leave it "
            "out, or choose 'forkserver' or 'spawn'"
        )
    return None if method is None else str(method)


def _is_weighted(sampler: Any) -> bool:
    return type(sampler) is WeightedRandomSampler and sampler.replacement


def _shuffle_of(sampler: Any) -> bool:
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is DistributedSampler:
        return sampler.shuffle
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return True
    raise ConfigError(
        f"a DataLoader with a {type(sampler).__name__} of its own cannot be divided over ranks; "
        "pass the data set itself, a torch.utils.data.Subset of it, or give the Loader "
        "sample_weights= (draws with replacement) or lengths= (batches of similar lengths)"
    )


def is_stream(data: Any) -> bool:
    """Whether these data are a stream, or a DataLoader of one."""
    return isinstance(data.dataset if isinstance(data, DataLoader) else data, IterableDataset)


def as_source(data: Any, collate: Collate | None) -> Source | Scattered | MapSource | Stream:
    """The source that these data are.

    Raises:
        ConfigError: they are none.
    """
    if is_arrays(data):
        return _without_collate(ArraySource(data), collate)
    if isinstance(data, tuple | Mapping):
        raise ConfigError(
            f"a {type(data).__name__} must hold only arrays or tensors, one row per sample; a "
            "data set of samples is a list or has __len__ and __getitem__"
        )
    if isinstance(data, IterableDataset):
        return Stream(data, collate)
    if type(data) is TensorDataset and collate is None:
        return ArraySource(data.tensors)
    if type(data) is Subset and type(data.dataset) is TensorDataset and collate is None:
        rows = np.asarray(data.indices, dtype=np.int64)
        return SubsetSource(ArraySource(data.dataset.tensors), rows)
    if isinstance(data, Scattered | Source):
        return _without_collate(data, collate)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise ConfigError(
            f"{type(data).__name__} is not a data source; give arrays, a data set with __len__ and "
            "__getitem__, an IterableDataset, a DataLoader, or something with take(indices)"
        )
    return MapSource(data, collate)


def _without_collate(source: Source | Scattered, collate: Collate | None) -> Source | Scattered:
    if collate is not None:
        raise ConfigError(
            "collate combines single samples, but these data come in whole batches; apply it to "
            "the batch in the loop"
        )
    return source


class SourceRows:
    """Rows that are read from a source as they are sent; all of them of the first one's form.

    Args:
        source: Reads batches: a source, or a data set whose samples can be put together.
        seed: Of the random numbers that a data set draws for its samples.
    """

    shapes = None
    num_pickled_bytes = 0

    def __init__(self, source: Source | MapSource, seed: int) -> None:
        self._source = source
        self._seed = seed
        self.num_rows = len(source)
        self.form = Table(self.take(np.arange(min(1, self.num_rows)))).form
        if self.form.varies:
            raise ConfigError("the samples of the data set cannot be combined into arrays")

    @property
    def sizes(self) -> int:
        """Bytes of a row."""
        return self.form.row_bytes

    def read(self, rows: np.ndarray, out: np.ndarray) -> int:
        """Write the bytes of these rows into `out`."""
        table = Table(self.take(rows))
        if table.form != self.form or table.num_rows != len(rows):
            told = table.form.difference(self.form) or f"{table.num_rows} rows for {len(rows)}"
            raise ConfigError(f"samples {rows[:4].tolist()}... differ from sample 0: {told}")
        return table.read(np.arange(len(rows)), out)

    def take(self, rows: np.ndarray) -> Any:
        """These rows as a batch."""
        if isinstance(self._source, MapSource):
            return _as_columns(self._source.fetch(rows, self._seed))
        return self._source.take(rows)


def _as_columns(batch: Any) -> Any:
    """Collating makes a list of a tuple's columns; a list of samples is something else here."""
    if isinstance(batch, list) and any(isinstance(part, torch.Tensor | dict) for part in batch):
        batch = tuple(batch)
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return tuple(_as_columns(part) for part in batch)
    return batch


def is_columns(data: Any) -> bool:
    """Whether these data are columns already: arrays, tensors, lists, dicts, tuples. Pure."""
    return isinstance(data, dict | tuple | list | np.ndarray | torch.Tensor)


def rows_of(data: Any, seed: int) -> Table | SourceRows:
    """Whatever a user may want to scatter, as rows.

    Raises:
        ConfigError: it is not a data set.
    """
    tensors = getattr(data, "tensors", None)
    if isinstance(tensors, tuple):  # torch's TensorDataset
        return Table(tensors)
    if is_columns(data) or not hasattr(data, "__len__") or hasattr(data, "to_numpy"):
        return Table(data)
    source = as_source(data, None)
    if isinstance(source, Stream | Scattered):
        raise ConfigError(
            f"{type(data).__name__} has no samples that can be read by number; scatter arrays, or "
            "a data set with __len__ and __getitem__"
        )
    return SourceRows(source, seed)
