"""Floor 3: a world with its watchdog and sweep settings, and engines for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec

from hpctrain import faults, timeline
from hpctrain import world as worlds
from hpctrain.engines import Engine, HorovodOptions, create
from hpctrain.sweep_request import Bench, request_of
from hpctrain.world import World, current_launch, takes_timeout

if TYPE_CHECKING:
    from hpctrain.faults import Watchdog

__all__ = ["Connection", "connect", "init"]

P = ParamSpec("P")

_ENDED = "its world is closed: do this inside the `with hpctrain.init()` block"


def _watched(join: Callable[P, World]) -> Callable[P, World]:
    @functools.wraps(join)
    def joined(*args: P.args, **options: P.kwargs) -> World:
        request = request_of(current_launch())
        world = join(*args, **options)
        if request is not None:
            world = replace(world, bench=Bench(request))
        faults.watch_world(world)
        return world

    return joined


init = _watched(worlds.init)


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """An engine, why it was chosen, and who watches over it."""

    engine: Engine
    reason: str
    watchdog: Watchdog | None = None

    def close(self) -> None:
        """Collective: close the engine, then end its watchdog; a second call does nothing."""
        self.engine.close()
        if self.watchdog is not None:
            self.watchdog.stop()


@takes_timeout
def connect(
    world: World,
    engine: str = "auto",
    *,
    timeout_s: float = 600.0,
    options: HorovodOptions | None = None,
) -> Connection:
    """Collective: connect all ranks by an engine; every rank passes the same arguments.

    The connection lives until it is closed, or as long as the world: leaving the world's block
    closes it.

    Args:
        world: The ranks.
        engine: `auto`, `local`, `mpi`, `horovod` or `torch`.
        timeout_s: How long a collective may wait for a rank before the job ends and names it.
        options: How Horovod works inside, where the engine is `horovod`.

    Raises:
        ConfigError: the engine is unknown or not built on some rank.
    """
    # The engine's own limit must not expire first: it has no names.
    patience_s = 2 * timeout_s + 60.0
    watchdog = faults.start(world, timeout_s=timeout_s)
    world.at_exit(watchdog.stop)
    recorder = timeline.start(world, watchdog)
    if recorder is None:
        link = create(world, engine, watch=watchdog, options=options, timeout_s=patience_s)
    else:
        tap = timeline.Tap(recorder, watchdog)
        link = create(world, engine, watch=tap, options=options, timeout_s=patience_s)
        link.on_post = recorder.post
    world.at_exit(partial(link.close, cure=_ENDED))
    return Connection(engine=link, reason=link.reason, watchdog=watchdog)
