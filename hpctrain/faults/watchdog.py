"""Every collective has a timeout; when it passes, the job says who is missing, and ends.

Each rank notes the collectives that it is in. A thread checks the notes periodically; when a
call has lasted too long, it queries all other ranks, over a channel besides MPI, prints
one report and ends the job (`hpctrain.faults.monitor`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from hpctrain import log
from hpctrain.errors import ConfigError
from hpctrain.faults.calls import CallLog
from hpctrain.faults.monitor import Monitor
from hpctrain.world import END_OF_BLOCK, World, agree

__all__ = ["Watchdog", "start", "watch_world"]


def start(world: World, *, timeout_s: float) -> Watchdog:
    """Collective: watch over collectives of a world; `timeout_s` must match.

    Args:
        world: The ranks. Where there is only one, nothing can be missing and nothing is watched.
        timeout_s: How long a collective may last, from when the first rank enters it.

    Raises:
        ConfigError: on all ranks, when `timeout_s` is not a positive time or differs.
        LaunchError: on all ranks, when a rank cannot listen.
    """
    trouble = None if timeout_s > 0 else f"timeout_s={timeout_s:g} must be more than 0"
    if world.size > 1:
        agree(world.comm, trouble, error=ConfigError)
        given = world.comm.allgather(timeout_s)
        trouble = None if len(set(given)) == 1 else f"timeout_s={given} must be equal on all ranks"
    if trouble is not None:
        raise ConfigError(trouble)
    watching = world.watching
    found = watching.watchdog
    if isinstance(found, Watchdog) and found.monitor is not None and found.monitor.is_running:
        return Watchdog(world, timeout_s=timeout_s, monitor=found.monitor)
    return Watchdog(world, timeout_s=timeout_s)


def watch_world(world: World) -> None:
    """Collective: watch over the world's own communicators until its block ends.

    A rank that is still at work when others have come to the end of the block is waited for, unless
    its process is stopped.
    """
    if world.size == 1:
        return
    watching = world.watching
    dog = start(world, timeout_s=watching.timeout_s)
    end = dog.among(range(world.size), may_be_late=True)
    groups = {
        "comm": dog,
        "node": dog.among(
            rank for rank, info in enumerate(world.ranks) if info.node_rank == world.node_rank
        ),
        "cross": dog.among(
            rank for rank, info in enumerate(world.ranks) if info.local_rank == world.local_rank
        ),
    }
    watching.watchdog = dog
    watching.watches.update(groups)

    def leave() -> None:
        watching.watches.clear()
        end.enter(END_OF_BLOCK)
        try:
            world.comm.Barrier()
        finally:
            end.leave()
            watching.watchdog = None
            dog.stop()

    world.at_exit(leave)


class Watchdog(CallLog):
    """Notices collectives that do not end. Made by `start`; `stop` ends it.

    It is itself the call log of the whole world: `enter` and `leave` surround each collective.
    """

    def __init__(self, world: World, *, timeout_s: float, monitor: Monitor | None = None) -> None:
        self._world = world
        self._owns_monitor = monitor is None and world.size > 1
        self.monitor = Monitor(world) if self._owns_monitor else monitor
        """One for all watchdogs of a world; None for a rank alone."""
        key = "world" if self.monitor is None else self.monitor.name_log("world")
        super().__init__(tuple(range(world.size)), key, timeout_s=timeout_s)
        self._own: list[CallLog] = []
        self._add(self)

    def _add(self, calls: CallLog) -> None:
        self._own.append(calls)
        if self.monitor is not None:
            self.monitor.add(calls)

    def among(
        self,
        ranks: Iterable[int],
        *,
        timeout_s: float | None = None,
        may_be_late: bool = False,
    ) -> CallLog:
        """A watch for the collectives of some ranks only, as of an engine that was split.

        Not collective, but each of these ranks makes the same logs in the same order.

        Args:
            ranks: Who takes part.
            timeout_s: How long their calls may last; None: as long as this watchdog's.
            may_be_late: See `CallLog`.
        """
        members = tuple(sorted(ranks))
        if self._world.rank not in members:
            raise ConfigError(
                f"among({list(members)}) does not contain this rank, {self._world.rank}; only "
                "participating ranks can watch its calls"
            )
        kind = f"ranks {log.format_ranges(members)}"
        calls = CallLog(
            members,
            f"{kind} ({len(self._own)})" if self.monitor is None else self.monitor.name_log(kind),
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            may_be_late=may_be_late,
        )
        self._add(calls)
        return calls

    @property
    def all_waited_s(self) -> float:
        """Seconds that this thread has spent in the calls of all its call logs."""
        return sum(calls.waited_s for calls in self._own)

    @contextlib.contextmanager
    def patience(self, seconds: float, *, lingers_s: float | None = None) -> Iterator[None]:
        """Allow calls at least `seconds` in this block, for one that is known to be long.

        The patience of any rank, also of one that is awaited, holds for those who wait.

        Args:
            seconds: How long.
            lingers_s: How long it stays after the block, so that the rank can come to its next
                call; None: one timeout.
        """
        if not seconds > 0:
            raise ConfigError(f"patience({seconds:g}): the seconds must be more than 0")
        if self.monitor is None:
            yield
            return
        self.monitor.begin_patience(seconds)
        try:
            yield
        finally:
            self.monitor.end_patience(
                seconds, lingers_s=self.timeout_s if lingers_s is None else lingers_s
            )

    def stop(self) -> None:
        """Stop watching over its logs. May be called again.

        The first watchdog of a world stops replying, too: other ranks that still wait for this one
        then learn only that no process listens here, so it belongs after the last collective.
        """
        if self.monitor is None:
            return
        if self._owns_monitor:
            self.monitor.stop()
        for calls in self._own:
            self.monitor.remove(calls)
