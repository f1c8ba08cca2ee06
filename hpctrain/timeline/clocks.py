"""How far the ranks' clocks are apart, and how well that is known.

A ping goes to another rank, which writes its own time into the answer. Whatever the network did,
the answer was written between sending and receiving, so each ping bounds the difference of the two
clocks from both sides; many pings bound it better than the quickest of them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from hpctrain.world import World

__all__ = ["Offset", "Ping", "add", "correct", "estimate", "measure"]

_NUM_PINGS = 64
_TAG = 7301


@dataclass(frozen=True, kw_only=True, slots=True)
class Offset:
    """How much a clock is ahead of rank 0's; the truth is within `error_ns` of it."""

    ns: float
    error_ns: float
    at_ns: float
    """When, on this rank's own clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ping:
    """One question and its answer; `there_ns` is on the other clock."""

    sent_ns: int
    there_ns: int
    back_ns: int


def estimate(pings: Sequence[Ping]) -> Offset:
    """How much the other clock is ahead of ours. Pure.

    Every ping says that the difference is at least `there - back` and at most `there - sent`; the
    truth is where all of them overlap. Clocks that drift during the pings may leave no overlap:
    then the quickest ping counts.
    """
    low = max(ping.there_ns - ping.back_ns for ping in pings)
    high = min(ping.there_ns - ping.sent_ns for ping in pings)
    best = min(pings, key=lambda ping: ping.back_ns - ping.sent_ns)
    if low > high:
        low, high = best.there_ns - best.back_ns, best.there_ns - best.sent_ns
    return Offset(ns=(low + high) / 2, error_ns=(high - low) / 2, at_ns=best.there_ns)


def add(near: Offset, far: Offset) -> Offset:
    """A clock against rank 0's, from those of a rank between: errors add up. Pure."""
    return Offset(ns=near.ns + far.ns, error_ns=near.error_ns + far.error_ns, at_ns=far.at_ns)


def correct(time_ns: float, begin: Offset, end: Offset | None) -> float:
    """A time of this rank on rank 0's clock; drift between two measurements is even. Pure."""
    if end is None or end.at_ns <= begin.at_ns:
        return time_ns - begin.ns
    part = (time_ns - begin.at_ns) / (end.at_ns - begin.at_ns)
    return time_ns - (begin.ns + min(max(part, 0.0), 1.0) * (end.ns - begin.ns))


def measure(world: World) -> Offset:
    """Collective: this rank's clock against rank 0's.

    Rank 0 queries the first rank of every node, and these the ranks of their node, all nodes at
    once: thousands of ranks take as long as their nodes.
    """
    own = Offset(ns=0.0, error_ns=0.0, at_ns=perf_counter_ns())
    if world.size == 1:
        return own
    leader = own
    if world.local_rank == 0:
        leader = _ask_all(world.cross, own)
    return _ask_all(world.node, leader)


def _ask_all(comm: Comm, own: Offset) -> Offset:
    """Collective: the root queries one after the other, and sends each its result."""
    if comm.rank != 0:
        return _answer(comm)
    for rank in range(1, comm.size):
        found = add(own, estimate(_ping(comm, rank)))
        told = np.array([found.ns, found.error_ns, found.at_ns])
        comm.Send(told, dest=rank, tag=_TAG)
    return own


def _ping(comm: Comm, rank: int) -> list[Ping]:
    there = np.zeros(1, dtype=np.int64)
    pings = []
    for _ in range(_NUM_PINGS):
        sent = perf_counter_ns()
        comm.Send(there, dest=rank, tag=_TAG)
        comm.Recv(there, source=rank, tag=_TAG)
        back = perf_counter_ns()
        pings.append(Ping(sent_ns=sent, there_ns=int(there[0]), back_ns=back))
    return pings


def _answer(comm: Comm) -> Offset:
    now = np.zeros(1, dtype=np.int64)
    for _ in range(_NUM_PINGS):
        comm.Recv(now, source=0, tag=_TAG)
        now[0] = perf_counter_ns()
        comm.Send(now, dest=0, tag=_TAG)
    told = np.zeros(3)
    comm.Recv(told, source=0, tag=_TAG)
    return Offset(ns=float(told[0]), error_ns=float(told[1]), at_ns=float(told[2]))
