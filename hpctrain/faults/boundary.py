"""The step boundary: where all ranks learn at the same step what any of them has to say.

A signal reaches one rank, a disk fills up under another: all must act at the same step. One small
non-blocking allreduce is posted at each boundary and completed at the next, when it has long
arrived: nobody waits for it, and what was said is known one step later.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hpctrain.errors import ConfigError, TimedOutError
from hpctrain.faults.stragglers import Finding, Stragglers, Tally, Work
from hpctrain.faults.watchdog import Watchdog, start
from hpctrain.faults.word import NUM_SLOTS, Agreed, Said, Word, decode, encode, merge
from hpctrain.world import World

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Prequest, Request

__all__ = ["Agreed", "Boundary", "Said", "Word"]

_CALL = "the step boundary"
_LOOKS = 200
_YIELDS_S = 2e-3
_NAP_S = 50e-6


_SILENT = Word()


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
        watchdog: Whose lanes to use; None starts one of the boundary's own.
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
        self._hosts = [info.host for info in world.ranks]
        self._judge = Stragglers(self._hosts)
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
        # The watchdog speaks first: it knows names.
        self._limit_s = 2 * timeout_s + 60.0
        self._open(world.comm.Dup())
        world.at_exit(self.close)

    def _open(self, comm: Comm) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._largest = MPI.MAX
        self._send = np.zeros(NUM_SLOTS)
        self._came = np.zeros(NUM_SLOTS)
        # Prepared once and started again and again: a third of the cost, where MPI 4 has it.
        self._again: Prequest | None = None
        with contextlib.suppress(NotImplementedError):
            self._again = comm.Allreduce_init(self._send, self._came, op=self._largest)

    def meet(self, said: Word = _SILENT, *, now: bool = False) -> Agreed:
        """Collective: say something, and hear what was said; `now` must match.

        Args:
            said: What this rank has to say. Its `worked_s`, where it gives none, is the time since
                the last boundary less the time in collectives that the watchdog knows of.
            now: Wait until all have come, and hear also what they say at this boundary.

        Returns:
            What all ranks said at the boundary before; nothing at the first one.

        Raises:
            TimedOutError: a rank did not come, and the watchdog could not end the job.
        """
        if self._closed:
            raise ConfigError("this step boundary is closed; make another one in the world's block")
        if self._comm is None:
            return self._meet_alone(said, now)
        worked_s = self._tally.passed(time.monotonic(), self._watchdog.all_waited_s)
        self._watch.enter(_CALL)
        try:
            before = self._complete()
            self._send[:] = encode(said, self._rank, self._size, worked_s)
            self._request = self._post(self._comm)
            if not now:
                return self._nothing if before is None else decode(before, self._size)
            at_once = self._complete()
        finally:
            self._watch.leave()
        both = [one for one in (before, at_once) if one is not None]
        return decode(merge(both), self._size)

    def hear(self, said: Said, text: str) -> str:
        """Collective: the text of the rank that said it; each rank gives its own, and `said`."""
        if self._comm is None:
            return text
        self._watch.enter(f"what rank {said.rank} says at {_CALL}")
        try:
            heard: str = self._comm.bcast(text if self._rank == said.rank else None, root=said.rank)
        finally:
            self._watch.leave()
        return heard

    def host_of(self, said: Said) -> str:
        """The host of the rank that said it."""
        return self._hosts[said.rank]

    def compare_ranks(self, *, step: int) -> Finding:
        """Collective: which ranks work longest since the last time it was asked; `step` must match.

        What a rank waits for others in collectives does not count. Where collectives end on a GPU,
        the host does not see that wait, and ranks look more alike than they are.
        """
        mine = self._tally.take()
        if self._comm is None:
            return self._judge.compare([mine], step=step)
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
        return self._judge.compare(works, step=step)

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

    def _meet_alone(self, said: Word, now: bool) -> Agreed:
        worked_s = self._tally.passed(time.monotonic(), 0.0)
        before, self._pending = self._pending, encode(said, 0, 1, worked_s)
        words = [before] if before is not None else []
        if now:
            words, self._pending = [*words, self._pending], None
        return decode(merge(words), 1) if words else self._nothing

    def _post(self, comm: Comm) -> Request:
        if self._again is None:
            return comm.Iallreduce(self._send, self._came, op=self._largest)
        self._again.Start()
        return self._again

    def _complete(self) -> list[float] | None:
        """What came of the last post; None where there was none."""
        request, self._request = self._request, None
        if request is None:
            return None
        for _ in range(_LOOKS):
            if request.Test():
                return self._came.tolist()
        began = time.monotonic()
        while not request.Test():
            waited_s = time.monotonic() - began
            if waited_s > self._limit_s:
                raise TimedOutError(
                    f"{_CALL}: a rank did not come within {self._limit_s:g} s; see what the others "
                    "do (an exception, another code path, a stopped node)"
                )
            if waited_s < _YIELDS_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
        return self._came.tolist()
