"""The step boundary: where all ranks learn at the same step what any of them reports.

A signal reaches one rank, a disk fills up under another: all must act at the same step. One small
non-blocking allreduce is posted at each boundary and completed at the next, when it has long
arrived: no rank waits for it, and the result is available one step later.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hpctrain.errors import ConfigError, TimedOutError
from hpctrain.faults.stragglers import StragglerReport, Stragglers, Tally, Work
from hpctrain.faults.watchdog import Watchdog, start
from hpctrain.world import World, poll

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Prequest, Request

__all__ = [
    "NUM_SLOTS",
    "Agreed",
    "Boundary",
    "BoundaryMessage",
    "Source",
    "decode",
    "encode",
    "merge",
]

_CALL = "the step boundary"
_LOOKS = 200
_YIELDS_S = 2e-3
_NAP_S = 50e-6

_VALUES = 256  # room for a value beside the rank
_FLAGS = ("signal", "save", "stop", "failure")
_NO_FLAGS = (0.0,) * len(_FLAGS)
NUM_SLOTS = len(_FLAGS) + 1
"""How many numbers a message takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryMessage:
    """What one rank says about itself at a step boundary."""

    signal: str | None = None
    """The name of a received signal, as in `Preemption.requested`."""
    save: bool = False
    """A checkpoint is due."""
    stop: bool = False
    """The training must stop."""
    failure: bool = False
    """A failure that concerns all ranks, such as a background write."""
    left_s: float | None = None
    """The time left in the allocation, if this rank has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a message came from: the lowest of the ranks that sent it."""

    rank: int
    value: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """What all ranks know after a step boundary; the same everywhere."""

    signal: str | None = None
    signal_by: Source | None = None
    save: Source | None = None
    stop: Source | None = None
    failure: Source | None = None
    left_s: float | None = None
    """The least time left on any rank."""


def encode(message: BoundaryMessage, rank: int, size: int) -> list[float]:
    """Write a rank's message as numbers of which the ranks take the maximum. Pure.

    One small allreduce then transfers it all. The sender is encoded in the same number: the
    lowest rank wins.

    Args:
        message: What it says.
        rank: Who says it.
        size: Of how many.

    Raises:
        ConfigError: the signal is not the name of a signal.
    """
    flags = _NO_FLAGS
    if message.signal is not None or message.save or message.stop or message.failure:
        flags = _encode_flags(message, (size - rank) * _VALUES)
    return [*flags, -math.inf if message.left_s is None else -message.left_s]


def _encode_flags(message: BoundaryMessage, mine: int) -> tuple[float, ...]:
    code = 0
    if message.signal is not None:
        try:
            code = int(signal.Signals[message.signal])
        except KeyError:
            raise ConfigError(
                f"signal={message.signal!r} is not the name of a signal; give e.g. SIGUSR2"
            ) from None
    return (
        float(mine + code) if message.signal is not None else 0.0,
        *(float(mine) if one else 0.0 for one in (message.save, message.stop, message.failure)),
    )


def decode(slots: Sequence[float], size: int) -> Agreed:
    """Read the maximum over all ranks' messages. Pure."""
    left = slots[-1]
    found: dict[str, Source] = {}
    if any(slots[: len(_FLAGS)]):
        for name, slot in zip(_FLAGS, slots, strict=False):
            if slot > 0:
                high, value = divmod(int(slot), _VALUES)
                found[name] = Source(rank=size - high, value=value)
    by = found.get("signal")
    return Agreed(
        signal=None if by is None else signal.Signals(by.value).name,
        signal_by=by,
        save=found.get("save"),
        stop=found.get("stop"),
        failure=found.get("failure"),
        left_s=None if math.isinf(left) and left < 0 else -left,
    )


def merge(messages: Sequence[Sequence[float]]) -> list[float]:
    """What the ranks' allreduce does, slot by slot. Pure."""
    return [max(column) for column in zip(*messages, strict=True)]


_NOTHING = BoundaryMessage()


class _Watch(Protocol):
    def enter(self, call: str) -> None: ...
    def leave(self) -> None: ...


class _Watchdog(Protocol):
    def among(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> _Watch: ...
    @property
    def all_waited_s(self) -> float: ...


class Boundary:
    """Collective: where ranks meet once per step; `timeout_s` must match.

    Args:
        world: The ranks. One rank alone uses no MPI.
        timeout_s: How long a rank may be late before the watchdog names it and ends the job.
        watchdog: What watches its calls; None starts one of the boundary's own.
    """

    def __init__(
        self, world: World, *, timeout_s: float = 600.0, watchdog: _Watchdog | None = None
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s:g} must be more than 0")
        self._rank, self._size = world.rank, world.size
        self._closed = False
        self._nothing = Agreed()
        self._tally = Tally()
        self._stragglers = Stragglers([info.host for info in world.ranks])
        self._request: Request | None = None
        self._comm: Comm | None = None
        self._own: Watchdog | None = None
        if self._size == 1:
            self._pending: list[float] | None = None
            return
        if watchdog is None:
            watchdog = self._own = start(world, timeout_s=timeout_s)
        self._watchdog = watchdog
        self._watch: _Watch = watchdog.among(range(world.size), timeout_s=timeout_s)
        # The watchdog reports first: it has the names.
        self._limit_s = 2 * timeout_s + 60.0
        self._open(world.comm.Dup())
        world.at_exit(self.close)

    def _open(self, comm: Comm) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._largest = MPI.MAX
        self._send = np.zeros(NUM_SLOTS)
        self._came = np.zeros(NUM_SLOTS)
        # Prepared once and started repeatedly: a third of the cost, with MPI 4.
        self._again: Prequest | None = None
        with contextlib.suppress(NotImplementedError):
            self._again = comm.Allreduce_init(self._send, self._came, op=self._largest)

    def meet(self, message: BoundaryMessage = _NOTHING, *, now: bool = False) -> Agreed:
        """Collective: send a message and learn what the others sent; `now` must match.

        Args:
            message: What this rank has to say.
            now: Wait until all have come, and learn also what they send at this boundary.

        Returns:
            What all ranks sent at the boundary before; nothing at the first one.

        Raises:
            TimedOutError: a rank did not arrive, and the watchdog could not end the job.
        """
        if self._closed:
            raise ConfigError("this step boundary is closed; make another one in the world's block")
        if self._comm is None:
            return self._meet_alone(message, now)
        self._tally.passed(time.monotonic(), self._watchdog.all_waited_s)
        self._watch.enter(_CALL)
        try:
            before = self._complete()
            self._send[:] = encode(message, self._rank, self._size)
            self._request = self._post(self._comm)
            if not now:
                return self._nothing if before is None else decode(before, self._size)
            at_once = self._complete()
        finally:
            self._watch.leave()
        both = [one for one in (before, at_once) if one is not None]
        return decode(merge(both), self._size)

    def broadcast(self, source: Source, text: str) -> str:
        """Collective: the text of the source's rank; each rank gives its own, `source` matches."""
        if self._comm is None:
            return text
        self._watch.enter(f"the text of rank {source.rank} at {_CALL}")
        try:
            found: str = self._comm.bcast(
                text if self._rank == source.rank else None, root=source.rank
            )
        finally:
            self._watch.leave()
        return found

    def compare_ranks(self, *, step: int) -> StragglerReport:
        """Collective: which ranks worked longest since the last call; `step` must match.

        What a rank waits for others in collectives does not count. Where collectives end on a GPU,
        the host does not see that wait, and differences look smaller than they are.
        """
        mine = self._tally.take()
        if self._comm is None:
            return self._stragglers.compare([mine], step=step)
        table = np.empty((self._size, 3))
        self._watch.enter("comparison of step times")
        try:
            self._comm.Allgather(np.array([mine.mean_s, mine.error_s, mine.num_steps]), table)
        finally:
            self._watch.leave()
        works = [
            Work(mean_s=mean_s, error_s=error_s, num_steps=int(num_steps))
            for mean_s, error_s, num_steps in table.tolist()
        ]
        return self._stragglers.compare(works, step=step)

    def close(self) -> None:
        """Collective: complete what is under way and give everything back. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._comm is not None:
            self._watch.enter(f"the end of {_CALL}")
            try:
                self._complete()
                if self._again is not None:
                    self._again.Free()
                self._comm.Free()
            finally:
                self._watch.leave()
        if self._own is not None:
            self._own.stop()

    def _meet_alone(self, message: BoundaryMessage, now: bool) -> Agreed:
        self._tally.passed(time.monotonic(), 0.0)
        before, self._pending = self._pending, encode(message, 0, 1)
        messages = [before] if before is not None else []
        if now:
            messages, self._pending = [*messages, self._pending], None
        return decode(merge(messages), 1) if messages else self._nothing

    def _post(self, comm: Comm) -> Request:
        if self._again is None:
            return comm.Iallreduce(self._send, self._came, op=self._largest)
        self._again.Start()
        return self._again

    def _complete(self) -> list[float] | None:
        """The result of the last post; None if there was none."""
        request, self._request = self._request, None
        if request is None:
            return None
        for _ in range(_LOOKS):
            if request.Test():
                return self._came.tolist()
        if not poll(request.Test, timeout_s=self._limit_s, spin_s=_YIELDS_S, longest_nap_s=_NAP_S):
            raise TimedOutError(
                f"{_CALL}: timed out after {self._limit_s:g} s waiting for the other ranks; check "
                "them (an exception, another code path, a stopped node)"
            )
        return self._came.tolist()
