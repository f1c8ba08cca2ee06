"""Communicators that announce their collectives, so that a rank that stays out can be named.

A world's communicators are of this kind. Until a watchdog is attached (`hpctrain.init` starts the
watchdog), they are plain communicators. What is made of them by `Dup` or `Split` is plain, too: its
owner announces its own calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from hpctrain.world.watching import Watching

__all__ = ["WatchedComm"]


class WatchedComm(MPI.Intracomm):
    """A communicator of a world. Its blocking collectives are announced."""

    watching: Watching
    label: str

    def __new__(cls, comm: MPI.Comm, watching: Watching, label: str) -> WatchedComm:
        """Another name for the same communicator, not a duplicate."""
        made = super().__new__(cls, comm)
        made.watching, made.label = watching, label
        return made

    @property
    def is_watched(self) -> bool:
        """Whether its collectives are monitored."""
        return self.label in self.watching.watches

    @property
    def plain(self) -> MPI.Intracomm:
        """The communicator itself."""
        return MPI.Intracomm(self)


def _announced(name: str) -> Callable[..., Any]:
    plain = getattr(MPI.Intracomm, name)

    @functools.wraps(plain)
    def call(self: WatchedComm, *args: Any, **options: Any) -> Any:
        with self.watching.announce(name, label=self.label):
            return plain(self.plain, *args, **options)

    return call


for _call in (
    *("Barrier", "barrier", "Bcast", "bcast", "Gather", "Gatherv", "gather"),
    *("Allgather", "Allgatherv", "allgather", "Scatter", "Scatterv", "scatter"),
    *("Reduce", "reduce", "Allreduce", "allreduce", "Scan", "scan", "Exscan", "exscan"),
    *("Alltoall", "Alltoallv", "Alltoallw", "alltoall", "Reduce_scatter", "Reduce_scatter_block"),
    *("Dup", "Clone", "Split", "Split_type", "Create"),
):
    setattr(WatchedComm, _call, _announced(_call))
