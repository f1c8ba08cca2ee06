"""Every collective has a timeout; when it passes, the job says who is missing, and ends.

Each rank notes the collectives that it is in. A thread looks at the notes from time to time; when a
call has lasted too long, it asks all other ranks where they are, over a channel beside MPI, prints
one report and ends the job (`hpctrain.faults.lookout`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from hpctrain import log
from hpctrain.errors import ConfigError
from hpctrain.faults.calls import Lane
from hpctrain.faults.lookout import Lookout
from hpctrain.world import World, agree

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
    if isinstance(found, Watchdog) and found.lookout is not None and found.lookout.is_running:
        return Watchdog(world, timeout_s=timeout_s, lookout=found.lookout)
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
        end.enter("the end of the world's block")
        try:
            world.comm.Barrier()
        finally:
            end.leave()
            watching.watchdog = None
            dog.stop()

    world.at_exit(leave)


class Watchdog(Lane):
    """Notices collectives that do not end. Made by `start`; `stop` ends it.

    It is itself a lane of the whole world: `enter` and `leave` go around each of its collectives.
    """

    def __init__(self, world: World, *, timeout_s: float, lookout: Lookout | None = None) -> None:
        self._world = world
        self._owns_lookout = lookout is None and world.size > 1
        self.lookout = Lookout(world) if self._owns_lookout else lookout
        """Who looks and answers: one for all watchdogs of a world; None for a rank alone."""
        key = "world" if self.lookout is None else self.lookout.name_lane("world")
        super().__init__(tuple(range(world.size)), key, timeout_s=timeout_s)
        self._own: list[Lane] = []
        self._add(self)

    def _add(self, lane: Lane) -> None:
        self._own.append(lane)
        if self.lookout is not None:
            self.lookout.add(lane)

    def among(
        self,
        ranks: Iterable[int],
        *,
        timeout_s: float | None = None,
        may_be_late: bool = False,
    ) -> Lane:
        """A watch for the collectives of some ranks only, as of an engine that was split.

        Not collective, but each of these ranks makes the same lanes in the same order.

        Args:
            ranks: Who takes part.
            timeout_s: How long their calls may last; None: as long as this watchdog's.
            may_be_late: See `Lane`.
        """
        members = tuple(sorted(ranks))
        if self._world.rank not in members:
            raise ConfigError(
                f"among({list(members)}) does not contain this rank, {self._world.rank}; only the "
                "ranks that take part make a lane"
            )
        kind = f"ranks {log.format_ranges(members)}"
        lane = Lane(
            members,
            f"{kind} ({len(self._own)})" if self.lookout is None else self.lookout.name_lane(kind),
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            may_be_late=may_be_late,
        )
        self._add(lane)
        return lane

    @property
    def all_waited_s(self) -> float:
        """Seconds that this thread has spent in the calls of all its lanes."""
        return sum(lane.waited_s for lane in self._own)

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
        if self.lookout is None:
            yield
            return
        self.lookout.begin_patience(seconds)
        try:
            yield
        finally:
            self.lookout.end_patience(
                seconds, lingers_s=self.timeout_s if lingers_s is None else lingers_s
            )

    def stop(self) -> None:
        """Stop watching over its lanes. May be called again.

        The first watchdog of a world stops answering, too: other ranks that still wait for this one
        then hear only that nobody listens here, so it belongs after the last collective.
        """
        if self.lookout is None:
            return
        if self._owns_lookout:
            self.lookout.stop()
        for lane in self._own:
            self.lookout.remove(lane)
