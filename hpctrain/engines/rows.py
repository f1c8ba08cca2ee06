"""Collectives whose sizes differ by rank: sizes first, over MPI, then bytes through the engine.

`Control` carries what ranks tell each other besides the data: sizes, colors, errors; always by MPI.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpctrain.engines import encoding
from hpctrain.errors import CollectiveError, ConfigError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["Control", "allgather", "alltoall", "check_splits", "parts_of"]

T = TypeVar("T")
Gather = Callable[[Tensor, list[int]], Tensor]
Exchange = Callable[[Tensor, list[int], list[int]], Tensor]


class Control:
    """A communicator of an engine's own for small messages; without one, a rank alone.

    It is separate from the engine's data, so that a size can be sent while an asynchronous
    collective is under way.
    """

    def __init__(self, comm: Comm | None) -> None:
        self.comm = None if comm is None else comm.Dup()
        self.rank = 0 if comm is None else comm.Get_rank()
        self.size = 1 if comm is None else comm.Get_size()

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Collective: every rank's numbers, in rank order; all give equally many."""
        mine = np.array(values, dtype=np.int64)
        table = np.empty((self.size, len(values)), dtype=np.int64)
        if self.comm is None:
            table[0] = mine
        else:
            self.comm.Allgather(mine, table)
        return [[int(value) for value in row] for row in table]

    def swap(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Collective: give row r to rank r; returns what each rank gave this one."""
        mine = np.array(rows, dtype=np.int64)
        table = mine.copy()
        if self.comm is not None:
            self.comm.Alltoall(mine, table)
        return [[int(value) for value in row] for row in table]

    def gather_objects(self, value: T) -> list[T]:
        """Collective: every rank's value, in rank order, as a pickle; for rare things only."""
        return [value] if self.comm is None else self.comm.allgather(value)

    def barrier(self) -> None:
        """Collective: wait for all ranks."""
        if self.comm is not None:
            self.comm.Barrier()

    def free(self) -> None:
        """Collective: give the communicator back."""
        if self.comm is not None:
            self.comm.Free()
            self.comm = None


def parts_of(table: list[tuple[int | None, int]]) -> dict[int, list[int]]:
    """The ranks of each color, in the order of their keys, then of their ranks. Pure."""
    parts: dict[int, list[int]] = {}
    order = sorted(range(len(table)), key=lambda rank: (table[rank][1], rank))
    for rank in order:
        color = table[rank][0]
        if color is not None:
            parts.setdefault(color, []).append(rank)
    return dict(sorted(parts.items()))


def allgather(
    control: Control, tensor: Tensor, chunk: int, gather: Gather
) -> tuple[Tensor, list[int]]:
    """Collective: join rows of all ranks; returns them and how many came from each.

    Args:
        control: How the ranks tell their sizes.
        tensor: At least one-dimensional; dtype and all dimensions but the first must match.
        chunk: The most bytes in one message.
        gather: The engine's primitive: own bytes and all counts to all ranks' bytes.
    """
    table = control.gather([tensor.shape[0], _kind(tensor)])
    _check_kinds(control, "allgather", tensor, [kind for _, kind in table])
    num_rows = [count for count, _ in table]
    flat = encoding.to_bytes(encoding.flatten(tensor))
    counts = [count * _row_bytes(tensor) for count in num_rows]
    most = max(1, chunk // control.size)
    if max(counts) <= most:
        joined = gather(flat, counts) if any(counts) else flat.new_empty(0)
    else:
        joined = flat.new_empty(sum(counts))
        for start, stop in encoding.rounds(max(counts), most):
            clipped = encoding.clip(counts, start, stop)
            _spread(gather(flat[start:stop], clipped), clipped, joined, counts, start, stop)
    return _shaped(joined, tensor, sum(num_rows)), num_rows


def alltoall(
    control: Control, tensor: Tensor, splits: Sequence[int] | None, chunk: int, exchange: Exchange
) -> tuple[Tensor, list[int]]:
    """Collective: give rows to each rank; returns the received ones and how many came from each.

    A mistake in `splits` on one rank is sent with the sizes, so that all ranks raise.
    """
    trouble = check_splits(tensor.shape[0], splits, control.size)
    rows_to = _equal(tensor.shape[0], control.size) if splits is None or trouble else list(splits)
    sent = [count * _row_bytes(tensor) for count in rows_to]
    mine = (_kind(tensor), max(sent), int(bool(trouble)))
    table = control.swap([[count, *mine] for count in rows_to])
    if any(row[3] for row in table):
        told = enumerate(control.gather_objects(trouble))
        raise ConfigError("; ".join(f"rank {rank}: {text}" for rank, text in told if text))
    _check_kinds(control, "alltoall", tensor, [row[1] for row in table])
    rows_from = [row[0] for row in table]
    received = [count * _row_bytes(tensor) for count in rows_from]
    largest = max(row[2] for row in table)
    flat = encoding.to_bytes(encoding.flatten(tensor))
    most = max(1, chunk // control.size)
    if largest <= most:
        came = exchange(flat, sent, received) if largest else flat.new_empty(0)
    else:
        came = flat.new_empty(sum(received))
        for start, stop in encoding.rounds(largest, most):
            piece = torch.cat(encoding.segments(flat, sent, start, stop))
            clipped = encoding.clip(received, start, stop)
            got = exchange(piece, encoding.clip(sent, start, stop), clipped)
            _spread(got, clipped, came, received, start, stop)
    return _shaped(came, tensor, sum(rows_from)), rows_from


def check_splits(num_rows: int, splits: Sequence[int] | None, size: int) -> str | None:
    """What is wrong with the splits of an alltoall on this rank, or None. Pure."""
    if splits is None:
        if num_rows % size:
            return f"alltoall: {num_rows} rows do not divide among {size} ranks; give splits"
        return None
    if len(splits) != size:
        return f"alltoall: {len(splits)} splits for {size} ranks; give one per rank"
    if any(count < 0 for count in splits) or sum(splits) != num_rows:
        return (
            f"alltoall: splits={list(splits)} must be 0 or more and sum to the {num_rows} rows of "
            f"the tensor; they sum to {sum(splits)}"
        )
    return None


def _equal(num_rows: int, size: int) -> list[int]:
    return [num_rows // size] * size


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _kind(tensor: Tensor) -> int:
    """A number that differs, as good as always, when rows do not fit together."""
    return zlib.crc32(_words(tensor).encode())


def _words(tensor: Tensor) -> str:
    return f"{tensor.dtype} rows of shape {tuple(tensor.shape[1:])}"


def _check_kinds(control: Control, call: str, tensor: Tensor, kinds: list[int]) -> None:
    """Refuse rows that do not fit together, on all ranks; communicates only when it fails."""
    if len(set(kinds)) == 1:
        return
    told = control.gather_objects(_words(tensor))
    odd = next(rank for rank, words in enumerate(told) if words != told[0])
    raise CollectiveError(
        f"{call}: rank 0 gives {told[0]}, rank {odd} gives {told[odd]}; dtype and all dimensions "
        "but the first must match on all ranks"
    )


def _spread(
    got: Tensor, clipped: list[int], whole: Tensor, counts: list[int], start: int, stop: int
) -> None:
    """Put what came in one round where it belongs in the whole."""
    parts = torch.split(got, clipped)
    for target, part in zip(encoding.segments(whole, counts, start, stop), parts, strict=True):
        target.copy_(part)


def _shaped(joined: Tensor, like: Tensor, num_rows: int) -> Tensor:
    return joined.view(like.dtype).view(num_rows, *like.shape[1:])
