"""A source, or a data set of single samples, as rows that can be scattered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hpctrain.data.adopting import as_source
from hpctrain.data.mapped import MapSource
from hpctrain.data.source import Scattered, Source
from hpctrain.data.stream import Stream
from hpctrain.data.table import Table
from hpctrain.errors import ConfigError

__all__ = ["SourceRows", "is_columns", "rows_of"]


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
            raise ConfigError("the samples of the data set cannot be put together into arrays")

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
        ConfigError: it is no data set.
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
