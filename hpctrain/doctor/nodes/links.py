"""Bandwidth, latency and clocks between nodes, measured by their leaders; no wait is unbounded.

Who measures with whom is a round-robin tournament, which is pure.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpctrain.doctor.nodes.report import NodeLink
from hpctrain.world import poll

if TYPE_CHECKING:
    import numpy as np
    from mpi4py.MPI import Comm, Request

__all__ = ["SilentError", "choose_rounds", "measure_clocks", "measure_link", "plan_rounds"]

_TAG = 7500
_NUM_PINGS = 20
_NUM_CLOCK_PINGS = 8
_BLOCK = 1 << 20
_LARGE_BLOCK = 4 << 20
_SPAN_S = 0.1
_MOST_BLOCKS = 25
_SPIN_S = 0.02


class SilentError(Exception):
    """The other side did not answer in time."""


class _Line:
    """Messages to and from one other node, each within the same deadline."""

    # A message that is still under way keeps its buffer for as long as the process lives.
    _abandoned: list[object] = []  # noqa: RUF012

    def __init__(self, comm: Comm, other: int, *, tag: int, limit_s: float) -> None:
        self._comm = comm
        self._other = other
        self._tag = tag
        self._deadline = time.monotonic() + limit_s

    def send(self, buffer: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        self._wait(self._comm.Isend(buffer, dest=self._other, tag=self._tag), buffer)

    def receive(self, buffer: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        self._wait(self._comm.Irecv(buffer, source=self._other, tag=self._tag), buffer)

    def _wait(self, request: Request, buffer: object) -> None:
        left_s = self._deadline - time.monotonic()
        if not poll(request.Test, timeout_s=left_s, spin_s=_SPIN_S, longest_nap_s=1e-4):
            self._abandoned += [request, buffer]
            raise SilentError


def measure_link(comm: Comm, other: int, *, turn: int, limit_s: float) -> NodeLink:
    """Collective over two ranks: each calls it with the other's rank and the same `turn`.

    The lower rank leads: small messages there and back for the latency, then blocks as large and as
    many as the link takes in about a tenth of a second.

    Returns:
        The link as this side saw it; the lower rank's is the one to keep.
    """
    import numpy as np

    rank = comm.Get_rank()
    line = _Line(comm, other, tag=_TAG + turn, limit_s=limit_s)
    leads = rank < other
    tiny = np.zeros(8, dtype=np.uint8)
    block = np.zeros(_LARGE_BLOCK, dtype=np.uint8)
    plan = np.zeros(2, dtype=np.int64)
    a, b = min(rank, other), max(rank, other)
    try:
        _bounce(line, tiny, leads=leads)  # connects
        trips = [_bounce(line, tiny, leads=leads) for _ in range(_NUM_PINGS)]
        first_s = _bounce(line, block[:_BLOCK], leads=leads)
        if leads:
            size = _LARGE_BLOCK if first_s < 0.01 else _BLOCK
            count = int(_SPAN_S / (first_s * size / _BLOCK))
            plan[:] = size, min(max(count, 1), _MOST_BLOCKS)
            line.send(plan)
        else:
            line.receive(plan)
        size, count = int(plan[0]), int(plan[1])
        times = [_bounce(line, block[:size], leads=leads) for _ in range(count)]
    except SilentError:
        return NodeLink(a=a, b=b, bandwidth=None, latency=None)
    trip_s = sum(times) / count
    return NodeLink(a=a, b=b, bandwidth=2 * size / trip_s / 1e6, latency=min(trips) / 2 * 1e6)


def _bounce(
    line: _Line, buffer: np.ndarray[tuple[int, ...], np.dtype[np.generic]], *, leads: bool
) -> float:
    begin = time.perf_counter()
    if leads:
        line.send(buffer)
        line.receive(buffer)
    else:
        line.receive(buffer)
        line.send(buffer)
    return time.perf_counter() - begin


def measure_clocks(comm: Comm, *, limit_s: float) -> list[tuple[float, float] | None]:
    """Collective: compare each rank's clock with rank 0's, one after the other.

    Of several questions the one answered fastest counts: the clock was read somewhere between
    question and answer, so half of that time is the error.

    Returns:
        On rank 0, for each rank (seconds ahead, error), None without an answer; else empty.
    """
    import numpy as np

    stamp = np.zeros(1, dtype=np.float64)
    if comm.Get_rank() != 0:
        line = _Line(comm, 0, tag=_TAG - 1, limit_s=limit_s)
        try:
            for _ in range(_NUM_CLOCK_PINGS):
                line.receive(stamp)
                stamp[0] = time.time()
                line.send(stamp)
        except SilentError:
            return []
        return []
    found: list[tuple[float, float] | None] = [(0.0, 0.0)]
    end = time.monotonic() + limit_s
    for other in range(1, comm.Get_size()):
        line = _Line(comm, other, tag=_TAG - 1, limit_s=min(5.0, max(0.0, end - time.monotonic())))
        found.append(_ask_clock(line, stamp))
    return found


def _ask_clock(
    line: _Line, stamp: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
) -> tuple[float, float] | None:
    answers = []
    try:
        for _ in range(_NUM_CLOCK_PINGS):
            asked = time.time()
            line.send(stamp)
            line.receive(stamp)
            answered = time.time()
            answers.append((answered - asked, float(stamp[0]) - (asked + answered) / 2))
    except SilentError:
        return None
    trip_s, offset_s = min(answers)
    return offset_s, trip_s / 2


def plan_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pair all nodes, so that each pair meets exactly once and no node is in two places at a time.

    The circle method: one place stays, the others go round it; with an odd number there is one
    place more than nodes, and the node paired with it rests.

    Returns:
        Rounds of pairs (lower, higher): n - 1 rounds for even n, n for odd n, none below 2.
    """
    if num_nodes < 2:
        return []
    places = list(range(num_nodes + num_nodes % 2))
    half = len(places) // 2
    rounds = []
    for _ in range(len(places) - 1):
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < num_nodes))
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def choose_rounds(num_nodes: int, *, most: int) -> list[list[tuple[int, int]]]:
    """Take the whole tournament, or `most` of its rounds spread evenly when it is longer.

    Every node still meets about `most` others, so that a node's typical link is known on a
    thousand nodes as well as on ten.
    """
    rounds = plan_rounds(num_nodes)
    if len(rounds) <= most:
        return rounds
    return [rounds[i * len(rounds) // most] for i in range(most)]
