"""What ranks tell each other besides the data: sizes, colors, troubles; always over MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["Control", "parts_of"]

T = TypeVar("T")


class Control:
    """A communicator of an engine's own for small messages; without one, a rank alone.

    It is apart from the engine's data, so that a size travels while an asynchronous collective is
    under way.
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
