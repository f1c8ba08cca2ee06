"""What a column of a data set is made of, and its rows as bytes. Pure.

Rows are sent as bytes, so every dtype works: float16 and bfloat16, dates, strings of fixed length,
records. Three kinds of column:

| kind | given as | a row |
| --- | --- | --- |
| `Dense` | an array or a tensor | equally many bytes each |
| `Ragged` | a list of arrays or tensors of one dtype and number of dimensions | as its shape says |
| `Objects` | any other list | a pickle: the last resort, slow and large |
"""

from __future__ import annotations

import math
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpctrain.errors import ConfigError

__all__ = ["Column", "Dense", "Objects", "Ragged", "as_bytes", "describe_column"]

_Dtype = np.dtype[Any] | torch.dtype


class Column(ABC):
    """One kind of column: how its rows are read as bytes, and how rows are made of bytes."""

    row_bytes: int | None
    """Bytes of every row; None where they differ."""
    num_dims: int = 0
    """How many numbers encode the shape of a row, if rows differ."""

    @abstractmethod
    def read(self, values: Any, rows: np.ndarray, out: np.ndarray) -> None:
        """Write the bytes of these rows into `out`, one after the other."""

    @abstractmethod
    def empty(self, num_rows: int, shapes: np.ndarray | None) -> Any:
        """Room for rows; `shapes` where they differ."""

    @abstractmethod
    def write(self, room: Any, rows: np.ndarray | slice, data: np.ndarray) -> None:
        """Put bytes, as `read` gives them, into these rows of the room."""

    @abstractmethod
    def finish(self, room: Any) -> Any:
        """What the user gets for a room that is full."""

    @abstractmethod
    def take(self, values: Any, rows: np.ndarray) -> Any:
        """These rows, as a column of the same kind."""

    def shapes(self, values: Any) -> np.ndarray:
        """The shape of each row, where they differ."""
        return np.zeros((len(values), 0), np.int64)

    def sizes(self, shapes: np.ndarray) -> np.ndarray:
        """Bytes of rows of these shapes."""
        return np.full(len(shapes), self.row_bytes or 0, np.int64)


@dataclass(frozen=True, slots=True)
class Dense(Column):
    """An array or a tensor whose rows are the samples."""

    dtype: _Dtype
    tail: tuple[int, ...]

    @property
    def row_bytes(self) -> int:  # type: ignore[override]
        """Bytes of every row."""
        return _itemsize(self.dtype) * math.prod(self.tail)

    def read(self, values: Any, rows: np.ndarray, out: np.ndarray) -> None:
        """Write the bytes of these rows into `out`."""
        if self.row_bytes == 0 or len(rows) == 0:
            return
        lines = out.reshape(len(rows), self.row_bytes)
        if _is_contiguous(values):
            whole = as_bytes(values).reshape(len(values), self.row_bytes)
            # clip: the mode that writes straight into `out`; the rows are known to exist.
            np.take(whole, rows, axis=0, out=lines, mode="clip")
        else:  # numpy.take would copy the whole array first
            lines[...] = as_bytes(self.take(values, rows)).reshape(lines.shape)

    def empty(self, num_rows: int, shapes: np.ndarray | None) -> Any:
        """Room for rows."""
        return _empty((num_rows, *self.tail), self.dtype)

    def write(self, room: Any, rows: np.ndarray | slice, data: np.ndarray) -> None:
        """Put bytes into rows."""
        if self.row_bytes:
            lines = as_bytes(room).reshape(len(room), self.row_bytes)
            lines[rows] = data.reshape(-1, self.row_bytes)

    def finish(self, room: Any) -> Any:
        """The array itself."""
        return room

    def take(self, values: Any, rows: np.ndarray) -> Any:
        """These rows, copied."""
        if isinstance(values, torch.Tensor):
            return values[torch.from_numpy(np.array(rows))].contiguous()
        return np.ascontiguousarray(values[rows]).reshape(len(rows), *self.tail)


@dataclass(frozen=True, slots=True)
class Ragged(Column):
    """A list of arrays or tensors of one dtype whose shapes differ."""

    dtype: _Dtype
    num_dims: int

    @property
    def row_bytes(self) -> None:  # type: ignore[override]
        """They differ."""
        return

    def read(self, values: Any, rows: np.ndarray, out: np.ndarray) -> None:
        """Write the bytes of these rows into `out`."""
        start = 0
        for row in rows.tolist():
            data = as_bytes(_contiguous(values[row]))
            out[start : start + len(data)] = data
            start += len(data)

    def empty(self, num_rows: int, shapes: np.ndarray | None) -> Any:
        """Rows that are parts of one array, so that many small ones cost little."""
        shapes = np.zeros((num_rows, self.num_dims), np.int64) if shapes is None else shapes
        counts = shapes.prod(axis=1, dtype=np.int64)
        ends = np.cumsum(counts).tolist()
        total = ends[-1] if ends else 0
        whole = _empty((total,), self.dtype)
        return [
            whole[end - count : end].reshape(shape)
            for end, count, shape in zip(
                ends, counts.tolist(), map(tuple, shapes.tolist()), strict=True
            )
        ]

    def write(self, room: Any, rows: np.ndarray | slice, data: np.ndarray) -> None:
        """Put bytes into rows."""
        start = 0
        for row in np.arange(len(room))[rows].tolist():
            line = as_bytes(room[row])
            line[...] = data[start : start + len(line)]
            start += len(line)

    def finish(self, room: Any) -> Any:
        """The list itself."""
        return room

    def take(self, values: Any, rows: np.ndarray) -> Any:
        """These rows, not copied."""
        return [values[row] for row in rows.tolist()]

    def shapes(self, values: Any) -> np.ndarray:
        """The shape of each row."""
        flat = [side for row in values for side in row.shape]
        return np.array(flat, np.int64).reshape(len(values), self.num_dims)

    def sizes(self, shapes: np.ndarray) -> np.ndarray:
        """Bytes of rows of these shapes."""
        sizes: np.ndarray = shapes.prod(axis=1, dtype=np.int64) * _itemsize(self.dtype)
        return sizes


@dataclass(frozen=True, slots=True)
class Objects(Column):
    """A list of Python objects, which are sent as pickles."""

    num_dims = 1

    @property
    def row_bytes(self) -> None:  # type: ignore[override]
        """They differ."""
        return

    def read(self, values: Any, rows: np.ndarray, out: np.ndarray) -> None:
        """Write the pickles of these rows into `out`."""
        start = 0
        for row in rows.tolist():
            data = np.frombuffer(_pickle(values[row]), np.uint8)
            out[start : start + len(data)] = data
            start += len(data)

    def empty(self, num_rows: int, shapes: np.ndarray | None) -> Any:
        """A list to be filled, and how long each pickle is."""
        shapes = np.zeros((num_rows, 1), np.int64) if shapes is None else shapes
        return [None] * num_rows, shapes[:, 0]

    def write(self, room: Any, rows: np.ndarray | slice, data: np.ndarray) -> None:
        """Make objects of pickles."""
        values, lengths = room
        start = 0
        for row in np.arange(len(values))[rows].tolist():
            stop = start + int(lengths[row])
            values[row] = pickle.loads(data[start:stop].data)
            start = stop

    def finish(self, room: Any) -> Any:
        """The list."""
        return room[0]

    def take(self, values: Any, rows: np.ndarray) -> Any:
        """These objects."""
        return [values[row] for row in rows.tolist()]

    def shapes(self, values: Any) -> np.ndarray:
        """How long each pickle is."""
        return np.array([len(_pickle(value)) for value in values], np.int64).reshape(-1, 1)

    def sizes(self, shapes: np.ndarray) -> np.ndarray:
        """Bytes of each pickle."""
        return shapes[:, 0]


def describe_column(values: Any, name: str) -> Column:
    """See what kind of column this is.

    Raises:
        ConfigError: it is none, or cannot be sent; the message says what to do.
    """
    if isinstance(values, torch.Tensor):
        return _describe_tensor(values, name)
    if isinstance(values, np.ndarray):
        return _describe_array(values, name)
    if isinstance(values, list):
        return _describe_list(values, name)
    if values is None:
        raise ConfigError(f"{name} is None; give an array, a tensor or a list of samples")
    hint = "call .to_numpy() first" if hasattr(values, "to_numpy") else "make an array or a list"
    raise ConfigError(
        f"{name} is a {type(values).__module__}.{type(values).__qualname__}, which cannot be a "
        f"column; use a numpy array, a torch tensor or a list of samples: {hint}"
    )


def as_bytes(values: Any) -> np.ndarray:
    """The memory of a contiguous array or tensor as bytes, not copied."""
    if isinstance(values, torch.Tensor):
        # One element may have any stride and still count as contiguous; a view does not think so.
        return values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy()
    flat: np.ndarray = np.asarray(values).reshape(-1)
    if flat.dtype.itemsize == 0:
        return np.empty(0, np.uint8)
    return flat.view(np.uint8)


def _describe_tensor(values: torch.Tensor, name: str) -> Dense:
    if values.layout is not torch.strided or values.is_nested or values.is_quantized:
        raise ConfigError(f"{name} is a sparse, nested or quantized tensor; make it dense first")
    if values.device.type != "cpu":
        raise ConfigError(
            f"{name} is on {values.device}; data sets are sent through the host: call .cpu() "
            "first; batches are copied to the device when used"
        )
    if values.requires_grad:
        raise ConfigError(f"{name} requires a gradient, which cannot be sent; call .detach()")
    if values.dim() == 0:
        raise ConfigError(f"{name} has no dimension whose rows are samples; give at least one")
    return Dense(dtype=values.dtype, tail=tuple(values.shape[1:]))


def _describe_array(values: np.ndarray, name: str) -> Dense:
    if type(values) not in (np.ndarray, np.memmap):
        raise ConfigError(
            f"{name} is a {type(values).__name__}, whose extra information (a mask, a unit) would "
            "be lost; give plain arrays, with the mask as a separate column"
        )
    if values.dtype.hasobject:
        raise ConfigError(
            f"{name} is an array of Python objects (dtype {values.dtype}); convert it to numbers "
            "or fixed-length strings with .astype(...), or give a list"
        )
    if values.ndim == 0:
        raise ConfigError(f"{name} has no dimension whose rows are samples; give at least one")
    return Dense(dtype=values.dtype, tail=values.shape[1:])


def _describe_list(values: list[Any], name: str) -> Column:
    first = values[0] if values else None
    if isinstance(first, dict):
        for number, sample in enumerate(values):
            if not isinstance(sample, dict) or sample.keys() != first.keys():
                keys = sorted(map(str, sample)) if isinstance(sample, dict) else type(sample)
                raise ConfigError(
                    f"{name}: sample {number} has {keys}, sample 0 has {sorted(map(str, first))}; "
                    "give every sample the same keys"
                )
    if not isinstance(first, torch.Tensor | np.ndarray):
        return Objects()
    if any(type(row) is not type(first) for row in values):
        return Objects()
    if any(row.dtype != first.dtype or row.ndim != first.ndim for row in values):
        return Objects()
    if first.ndim == 0:  # these have rows of one shape, but none that could be cut
        return Ragged(dtype=first.dtype, num_dims=0)
    describe = _describe_tensor if isinstance(first, torch.Tensor) else _describe_array
    for number, row in enumerate(values):
        describe(row, f"{name}[{number}]")
    return Ragged(dtype=first.dtype, num_dims=first.ndim)


def _empty(shape: tuple[int, ...], dtype: _Dtype) -> Any:
    if isinstance(dtype, torch.dtype):
        return torch.empty(shape, dtype=dtype)
    return np.empty(shape, dtype=dtype)


def _itemsize(dtype: _Dtype) -> int:
    return dtype.itemsize


def _is_contiguous(values: Any) -> bool:
    if isinstance(values, torch.Tensor):
        return values.is_contiguous()
    return bool(values.flags.c_contiguous)


def _contiguous(values: Any) -> Any:
    return values.contiguous() if isinstance(values, torch.Tensor) else np.ascontiguousarray(values)


def _pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
