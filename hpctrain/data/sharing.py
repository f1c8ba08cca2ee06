"""`share`: one copy of a data set per node, which all ranks of the node and their workers read."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from hpctrain.data.alike import require_alike
from hpctrain.data.columns import Dense
from hpctrain.data.partition import block
from hpctrain.data.source import ArraySource, Source
from hpctrain.data.storage import Named, name_columns, name_files, open_named
from hpctrain.data.table import ColumnTree, Form, Table, split_rows
from hpctrain.errors import ConfigError, DataError
from hpctrain.world import SharedBlock, World, agree, allocate, finish, roll_call, takes_timeout

__all__ = ["Layout", "Shared", "share"]

_ALIGNED_BYTES = 64
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the columns are in a node's memory. Pure."""

    outline: ColumnTree
    columns: tuple[Dense, ...]
    num_rows: int

    @property
    def starts(self) -> list[int]:
        """The first byte of each column, and the end of the last."""
        starts = [0]
        for column in self.columns:
            size = column.row_bytes * self.num_rows
            starts.append(starts[-1] + -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES)
        return starts

    def build(self, memory: np.ndarray) -> Any:
        """The data set as read-only arrays over memory."""
        arrays = []
        for column, start in zip(self.columns, self.starts, strict=False):
            part = memory[start : start + column.row_bytes * self.num_rows]
            shape = (self.num_rows, *column.tail)
            dtype = cast("np.dtype[Any]", column.dtype)
            array = np.empty(shape, dtype) if not part.size else part.view(dtype).reshape(shape)
            array.flags.writeable = False
            arrays.append(array)
        return self.outline.build(arrays)


class Shared(ArraySource):
    """A node's copy of a data set, seen from one process. Made by `share`.

    A source for a loader. It can be sent to worker processes of this rank: they read the same
    memory. The memory goes when the last process of the node lets its copy, and all arrays of it,
    go.

    Args:
        layout: Where the columns are.
        memory: The node's memory.
        owner: The process and the descriptor by which others can open the memory.
    """

    def __init__(self, layout: Layout, memory: np.ndarray, owner: tuple[int, int]) -> None:
        self.data = layout.build(memory)
        """The whole data set, as read-only arrays in the form in which it was given."""
        super().__init__(self.data)
        self._layout = layout
        self._owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self._layout, self._owner)


@takes_timeout
def share(
    world: World,
    *data: Any,
    rows: Sequence[str | Path] | None = None,
    columns: Sequence[str | Path] | Mapping[str, str | Path] | None = None,
    root: int = 0,
    chunk_bytes: int = _CHUNK_BYTES,
    timeout_s: float | None = None,
) -> Shared:
    """Collective: hold a data set once per node; all but the root's `data` must match.

    From files, all ranks of a node read, each a part. From arrays, the root sends to each node.

    Args:
        world: The ranks.
        data: One path, as `files` takes it, on all ranks; several are columns, unless they can be
            meant as parts of the rows. Or, on the root, arrays, tensors, or one dict or tuple of
            them, and None on the other ranks.
        rows: Instead: several files whose rows follow each other, as `files` takes them.
        columns: Which arrays of a file; or the files that are the columns, as `files` takes them.
        root: Who has the arrays.
        chunk_bytes: Extra memory while the copy is made.
        timeout_s: How long to wait for missing ranks.
            None: as long as the world waits for any rank.

    Returns:
        A source for a loader; `.data` are the arrays, read-only. Tensors are returned as arrays.

    Raises:
        ConfigError, DataError: on all ranks: the data or the arguments are wrong.
        CollectiveError: a node has no room for the copy.
    """
    timeout_s = world.watching.limit_s(timeout_s)
    paths = [str(part) for part in data if isinstance(part, str | Path)]
    roll_call(world.comm, "share", timeout_s=timeout_s)
    says_path = bool(paths) or rows is not None or columns is not None
    by_path = world.comm.bcast(says_path, root=root if 0 <= root < world.size else 0)
    settings = {
        "root": root,
        "chunk_bytes": chunk_bytes,
        "paths": paths if by_path else None,
        "rows": None if rows is None else [*map(str, rows)],
        "columns": _plain(columns),
    }
    require_alike(world, "share", settings, timeout_s=timeout_s)
    files = _Files(paths, rows, columns) if says_path else None
    source, layout, trouble = _examine(world, data, files, root, chunk_bytes)
    agree(world.comm, trouble.get(DataError), error=DataError, timeout_s=timeout_s)
    agree(world.comm, trouble.get(ConfigError), error=ConfigError, timeout_s=timeout_s)
    layout = world.comm.bcast(layout, root=root)
    made = allocate(world.comm, world.node, layout.starts[-1], what="a data set")
    memory = _bytes_of(made, layout.starts[-1])
    failure = None
    if by_path:
        try:
            _fill_stripe(world, cast(Source, source), layout, memory, chunk_bytes)
        except Exception as error:  # each library has its own, and the other ranks wait
            failure = f"share: {error}"
    else:
        _fill_nodes(
            world,
            cast("Table | None", source),
            layout,
            memory,
            root,
            chunk_bytes,
            timeout_s,
        )
    del source  # its memory maps count as this rank's own memory
    try:
        agree(world.comm, failure, error=DataError, timeout_s=timeout_s)
    except DataError:
        made.close()
        raise
    shared = Shared(layout, memory, (os.getpid(), made.descriptor))
    weakref.finalize(shared, made.close)
    return shared


class _Files(NamedTuple):
    """What was said of files."""

    paths: list[str]
    rows: Sequence[str | Path] | None
    columns: Sequence[str | Path] | Mapping[str, str | Path] | None

    def name(self) -> Named:
        if len(self.paths) > 1 and self.rows is None and self.columns is None:
            return name_columns("share", self.paths)
        return name_files("share", self.paths, self.rows, self.columns)


def _plain(columns: Sequence[str | Path] | Mapping[str, str | Path] | None) -> object:
    """As ranks can compare it."""
    if columns is None:
        return None
    if isinstance(columns, Mapping):
        return {name: str(path) for name, path in columns.items()}
    return [*map(str, columns)]


def _examine(
    world: World, data: tuple[Any, ...], files: _Files | None, root: int, chunk_bytes: int
) -> tuple[Source | Table | None, Layout | None, dict[type, str]]:
    """What this rank can read, how it is laid out, or what is wrong."""
    try:
        return *_look(world, data, files, root, chunk_bytes), {}
    except (ConfigError, DataError) as error:
        return None, None, {type(error): f"share: {error}"}
    except Exception as error:  # invalid data may raise anything, and the other ranks wait
        return None, None, {ConfigError: f"share: {type(error).__name__}: {error}"}


def _look(
    world: World, data: tuple[Any, ...], files: _Files | None, root: int, chunk_bytes: int
) -> tuple[Source | Table | None, Layout | None]:
    if not 0 <= root < world.size:
        raise ConfigError(f"root={root} is not a rank; choose 0 <= root < {world.size}")
    if chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes={chunk_bytes} must be at least 1")
    if files is not None:
        if len(files.paths) != len(data):
            raise ConfigError("paths and arrays cannot be shared together; share them apart")
        source = open_named(files.name())
        sample = Table(source.take(np.arange(min(1, len(source)))))
        return source, _lay_out(sample.form, len(source))
    empty = all(part is None for part in data)
    if world.rank != root:
        if not empty:
            raise ConfigError(f"only root={root} passes arrays; pass None on the other ranks")
        return None, None
    if empty:
        raise ConfigError(f"no data on root={root}; give paths on all ranks, or arrays there")
    table = Table(data[0] if len(data) == 1 else tuple(data))
    return table, _lay_out(table.form, table.num_rows)


def _lay_out(form: Form, num_rows: int) -> Layout:
    columns = []
    for name, kind in zip(form.outline.names, form.kinds, strict=True):
        if not isinstance(kind, Dense):
            raise ConfigError(f"{name} is a list; arrays and tensors can be shared: make it one")
        columns.append(Dense(dtype=_numpy_dtype(kind, name), tail=kind.tail))
    return Layout(form.outline, tuple(columns), num_rows)


def _numpy_dtype(kind: Dense, name: str) -> np.dtype[Any]:
    if isinstance(kind.dtype, np.dtype):
        return kind.dtype
    try:
        return cast("np.dtype[Any]", kind.empty(0, None).numpy().dtype)
    except TypeError as error:
        raise ConfigError(
            f"{name} is {kind.dtype}, which numpy does not have, so no read-only view can be made; "
            "share it as integers of the same width, with .view(torch.int16) or the like"
        ) from error


def _fill_stripe(
    world: World, source: Source, layout: Layout, memory: np.ndarray, chunk_bytes: int
) -> None:
    """This rank's part of the node's copy, from the files."""
    own = block(layout.num_rows, world.local_size, world.local_rank)
    row_bytes = sum(column.row_bytes for column in layout.columns)
    for start, stop in split_rows(row_bytes, len(own), chunk_bytes):
        rows = np.arange(own.start + start, own.start + stop, dtype=np.int64)
        _write(layout, memory, rows, Table(source.take(rows)), np.arange(len(rows)))


def _fill_nodes(
    world: World,
    table: Table | None,
    layout: Layout,
    memory: np.ndarray,
    root: int,
    chunk_bytes: int,
    timeout_s: float,
) -> None:
    """Collective: the root's arrays to one rank of each node, which writes them down."""
    root_node = world.ranks[root].node_rank
    writes = world.rank == root if world.node_rank == root_node else world.local_rank == 0
    from mpi4py import MPI

    writers = world.comm.Split(0 if writes else MPI.UNDEFINED, key=-1 if world.rank == root else 0)
    if writers == MPI.COMM_NULL:
        return
    row_bytes = sum(column.row_bytes for column in layout.columns)
    for start, stop in split_rows(row_bytes, layout.num_rows, min(chunk_bytes, 1 << 30)):
        rows = np.arange(start, stop, dtype=np.int64)
        if table is not None:
            _write(layout, memory, rows, table, rows)
        for column, first in zip(layout.columns, layout.starts, strict=False):
            part = memory[first + start * column.row_bytes : first + stop * column.row_bytes]
            for at in range(0, len(part), 1 << 30):
                if writers.Get_size() > 1:
                    sent = writers.Ibcast(part[at : at + (1 << 30)], root=0)
                    finish([sent], f"rank {root} to forward rows", timeout_s=timeout_s)
    writers.Free()


def _write(
    layout: Layout, memory: np.ndarray, rows: np.ndarray, table: Table, picked: np.ndarray
) -> None:
    """Put rows of a table into the node's memory; they are contiguous there."""
    for column, kind, values, first in zip(
        layout.columns, table.form.kinds, table.values, layout.starts, strict=False
    ):
        start = first + int(rows[0]) * column.row_bytes
        kind.read(values, picked, memory[start : start + len(rows) * column.row_bytes])


def _bytes_of(made: SharedBlock, num_bytes: int) -> np.ndarray:
    import torch

    return made.tensor(torch.uint8, num_elements=max(num_bytes, 1)).numpy()[:num_bytes]


def _attach(layout: Layout, owner: tuple[int, int]) -> Shared:
    """In a worker: the same memory, opened read-only through the process that has it."""
    process, descriptor = owner
    try:
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY)
    except OSError as error:
        raise DataError(
            f"the node's copy of a data set cannot be opened through process {process} "
            f"({error.strerror}); it can be used by workers of a rank, while the rank runs"
        ) from error
    try:
        size = max(layout.starts[-1], 1)
        mapped = mmap.mmap(opened, size, access=mmap.ACCESS_READ)
    finally:
        os.close(opened)
    memory = np.frombuffer(mapped, np.uint8)[: layout.starts[-1]]
    return Shared(layout, memory, owner)
