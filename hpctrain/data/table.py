"""A data set as rows of bytes: its form, its rows, memory for rows that arrive, and cuts. Pure.

A data set is one column, or a dict, tuple or named tuple of columns, nested as deep as one likes.
An array or a tensor is a column whose rows are the samples; a list is one whose items are. A `Form`
must be the same on all ranks; a `Table` has the rows of one rank, `Arrivals` is where rows
arrive. On their way rows are cut into chunks, and chunks into messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.data.columns import Column, Dense, Objects, describe_column
from hpctrain.errors import ConfigError

__all__ = [
    "MESSAGE_BYTES",
    "Arrivals",
    "ColumnTree",
    "Form",
    "Table",
    "check_chunk",
    "flatten",
    "share_length",
    "split_bytes",
    "split_rows",
]


@dataclass(frozen=True, slots=True)
class Form:
    """How rows are made of columns; the same on all ranks."""

    outline: ColumnTree
    kinds: tuple[Column, ...]

    @property
    def varies(self) -> bool:
        """Whether rows have different numbers of bytes, so that a table of shapes is needed."""
        return any(kind.row_bytes is None for kind in self.kinds)

    @property
    def num_dims(self) -> int:
        """How many numbers tell the shapes of a row."""
        return sum(kind.num_dims for kind in self.kinds)

    @property
    def row_bytes(self) -> int:
        """Bytes of the columns whose rows all have the same size."""
        return sum(kind.row_bytes or 0 for kind in self.kinds)

    def sizes(self, shapes: np.ndarray | None) -> int | np.ndarray:
        """Bytes of a row, or of each row where they differ."""
        if shapes is None:
            return self.row_bytes
        sizes = np.full(len(shapes), self.row_bytes, np.int64)
        for kind, part in zip(self.kinds, self.cut_shapes(shapes), strict=True):
            if kind.row_bytes is None:
                sizes += kind.sizes(part)
        return sizes

    def of_shapes(self) -> Form:
        """The form of a table of shapes."""
        return Form(ColumnTree(), (Dense(dtype=np.dtype(np.int64), tail=(self.num_dims,)),))

    def cut_shapes(self, shapes: np.ndarray) -> list[np.ndarray]:
        """The part of a table of shapes that belongs to each column."""
        ends = np.cumsum([kind.num_dims for kind in self.kinds])
        return np.split(shapes, ends[:-1], axis=1)

    def difference(self, other: Form) -> str | None:
        """How this form differs from another; None if it does not."""
        if self == other:
            return None
        if self.outline != other.outline:
            return f"columns {list(self.outline.names)} instead of {list(other.outline.names)}"
        for name, mine, theirs in zip(self.outline.names, self.kinds, other.kinds, strict=True):
            if mine != theirs:
                return f"{name} is {mine} instead of {theirs}"
        return "a form of its own"


class Table:
    """The rows of one rank.

    Args:
        data: Columns as `outline` describes them.
    """

    def __init__(self, data: Any) -> None:
        outline, self.values = flatten(data)
        names = outline.names
        kinds = tuple(describe_column(v, n) for v, n in zip(self.values, names, strict=True))
        self.form = Form(outline, kinds)
        lengths = [len(values) for values in self.values]
        if len(set(lengths)) > 1:
            told = ", ".join(f"{n} {count}" for n, count in zip(names, lengths, strict=True))
            raise ConfigError(f"the columns have different numbers of samples: {told}")
        self.num_rows = lengths[0]
        self.shapes = self._find_shapes()

    @property
    def sizes(self) -> int | np.ndarray:
        """Bytes of a row, or of each row where they differ."""
        return self.form.sizes(self.shapes)

    @property
    def num_pickled_bytes(self) -> int:
        """How much of it can only be sent as pickles of Python objects."""
        if self.shapes is None:
            return 0
        parts = zip(self.form.kinds, self.form.cut_shapes(self.shapes), strict=True)
        return sum(int(part.sum()) for kind, part in parts if isinstance(kind, Objects))

    def read(self, rows: np.ndarray, out: np.ndarray) -> int:
        """Write the bytes of these rows into `out`, column after column; how many they are."""
        start = 0
        for kind, values, num_bytes in self._parts(rows):
            kind.read(values, rows, out[start : start + num_bytes])
            start += num_bytes
        return start

    def take(self, rows: np.ndarray) -> Any:
        """These rows, in the form that the data set was given in."""
        pairs = zip(self.form.kinds, self.values, strict=True)
        return self.form.outline.build([kind.take(values, rows) for kind, values in pairs])

    def _parts(self, rows: np.ndarray) -> list[tuple[Column, Any, int]]:
        shapes = None if self.shapes is None else self.shapes[rows]
        counts = column_bytes(self.form, len(rows), shapes)
        return list(zip(self.form.kinds, self.values, counts, strict=True))

    def _find_shapes(self) -> np.ndarray | None:
        if not self.form.varies:
            return None
        pairs = zip(self.form.kinds, self.values, strict=True)
        parts = [
            kind.shapes(values)
            if kind.row_bytes is None
            else np.zeros((self.num_rows, 0), np.int64)
            for kind, values in pairs
        ]
        return np.concatenate(parts, axis=1)


class Arrivals:
    """Where rows arrive, in any order.

    Args:
        form: What the rows are made of.
        num_rows: How many there will be.
        shapes: Of each row, where they differ.
    """

    def __init__(self, form: Form, num_rows: int, shapes: np.ndarray | None) -> None:
        self.form = form
        self.num_rows = num_rows
        self.shapes = shapes
        parts: Sequence[np.ndarray | None] = [None] * len(form.kinds)
        if shapes is not None:
            parts = form.cut_shapes(shapes)
        pairs = zip(form.kinds, parts, strict=True)
        self.rooms = [kind.empty(num_rows, part) for kind, part in pairs]

    def write(self, rows: np.ndarray | slice, data: np.ndarray) -> None:
        """Put the bytes of rows, as `Table.read` gives them, into their places."""
        shapes = None if self.shapes is None else self.shapes[rows]
        num = len(range(*rows.indices(self.num_rows))) if isinstance(rows, slice) else len(rows)
        start = 0
        counts = column_bytes(self.form, num, shapes)
        for kind, room, num_bytes in zip(self.form.kinds, self.rooms, counts, strict=True):
            kind.write(room, rows, data[start : start + num_bytes])
            start += num_bytes

    def finish(self) -> Any:
        """The data set, once all rows are there."""
        pairs = zip(self.form.kinds, self.rooms, strict=True)
        return self.form.outline.build([kind.finish(room) for kind, room in pairs])


def column_bytes(form: Form, num_rows: int, shapes: np.ndarray | None) -> list[int]:
    """How many bytes each column has in a chunk of these rows. Pure."""
    if shapes is None:
        return [num_rows * (kind.row_bytes or 0) for kind in form.kinds]
    parts = zip(form.kinds, form.cut_shapes(shapes), strict=True)
    return [
        num_rows * kind.row_bytes if kind.row_bytes is not None else int(kind.sizes(part).sum())
        for kind, part in parts
    ]


@dataclass(frozen=True, slots=True)
class ColumnTree:
    """A form that columns can be put back into."""

    made: type | None = None
    """The type of the container; None for a column."""
    keys: tuple[str, ...] = ()
    children: tuple[ColumnTree, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What the columns are called in messages, in order."""
        return tuple(f"data{path}" for path in self._paths())

    def build(self, columns: Sequence[Any]) -> Any:
        """Put columns into the form."""
        left = list(columns)
        return self._take(left)

    def _paths(self) -> list[str]:
        if self.made is None:
            return [""]
        return [
            f"[{key!r}]" + rest if self.keys else f"[{number}]" + rest
            for number, (key, child) in enumerate(
                zip(self.keys or [""] * len(self.children), self.children, strict=True)
            )
            for rest in child._paths()
        ]

    def _take(self, left: list[Any]) -> Any:
        if self.made is None:
            return left.pop(0)
        parts = [child._take(left) for child in self.children]
        if self.keys:
            return dict(zip(self.keys, parts, strict=True))
        return self.made(*parts) if hasattr(self.made, "_fields") else tuple(parts)


def flatten(data: Any) -> tuple[ColumnTree, list[Any]]:
    """Take a data set apart into its form and its columns.

    Raises:
        ConfigError: a container is empty, or a key is not a string.
    """
    columns: list[Any] = []
    return _visit(data, "data", columns), columns


def _visit(data: Any, path: str, columns: list[Any]) -> ColumnTree:
    if isinstance(data, dict):
        odd = [key for key in data if not isinstance(key, str)]
        if odd:
            raise ConfigError(
                f"{path}: the key {odd[0]!r} is not a string; name columns by strings"
            )
        _refuse_empty(data, path)
        children = tuple(_visit(part, f"{path}[{key!r}]", columns) for key, part in data.items())
        return ColumnTree(made=dict, keys=tuple(data), children=children)
    if isinstance(data, tuple):
        _refuse_empty(data, path)
        children = tuple(_visit(part, f"{path}[{i}]", columns) for i, part in enumerate(data))
        return ColumnTree(made=type(data) if hasattr(data, "_fields") else tuple, children=children)
    columns.append(data)
    return ColumnTree()


def _refuse_empty(data: Any, path: str) -> None:
    if not data:
        raise ConfigError(f"{path}: an empty {type(data).__name__} has no columns; give arrays")


MESSAGE_BYTES = 2**30
"""The most bytes in one message: counts in MPI 3 have 31 bits."""

_LEAST_CHUNK_BYTES = 16


def share_length(total: int, rank: int, size: int) -> int:
    """How many of the positions 0 .. total-1 a rank owns cyclically. Pure."""
    return len(range(rank, total, size))


def split_bytes(num_bytes: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut bytes into ranges of at most `limit`; nothing when there are none. Pure."""
    for start in range(0, num_bytes, limit):
        yield start, min(start + limit, num_bytes)


def split_rows(
    sizes: int | np.ndarray, num_rows: int, limit_bytes: int
) -> Iterator[tuple[int, int]]:
    """Cut rows into ranges that hold at most `limit_bytes`, and at least one row. Pure.

    Args:
        sizes: Bytes of every row, or of each.
        num_rows: How many rows there are.
        limit_bytes: The most bytes in a range, where one row is not larger already.
    """
    if isinstance(sizes, int):
        step = max(1, limit_bytes // sizes) if sizes > 0 else max(1, num_rows)
        yield from split_bytes(num_rows, step)
        return
    ends = np.cumsum(sizes, dtype=np.int64)
    start = 0
    while start < num_rows:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + limit_bytes, side="right"))
        stop = min(max(stop, start + 1), num_rows)
        yield start, stop
        start = stop


def check_chunk(chunk_bytes: int) -> str | None:
    """What is wrong with a chunk size, or None. Pure."""
    if chunk_bytes < _LEAST_CHUNK_BYTES:
        return f"chunk_bytes={chunk_bytes} must be at least {_LEAST_CHUNK_BYTES}"
    return None
