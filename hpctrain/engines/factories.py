"""How each engine is made from a world; the module of an engine is imported when it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.engines.base import Engine
    from hpctrain.engines.horovod_options import HorovodOptions
    from hpctrain.engines.meeting import Watchdog
    from hpctrain.world import World

__all__ = ["make_horovod", "make_local", "make_mpi", "make_torch"]


def make_local(
    world: World, *, watch: Watchdog | None, options: HorovodOptions | None, timeout_s: float
) -> Engine:
    """One rank alone."""
    from hpctrain.engines.local import LocalEngine

    return LocalEngine(world.device, watch=watch)


def make_mpi(
    world: World, *, watch: Watchdog | None, options: HorovodOptions | None, timeout_s: float
) -> Engine:
    """Collective: over mpi4py."""
    from hpctrain.engines.mpi import MpiEngine

    return MpiEngine(world.comm, world.device, watch=watch)


def make_horovod(
    world: World, *, watch: Watchdog | None, options: HorovodOptions | None, timeout_s: float
) -> Engine:
    """Collective: over Horovod, which is started if it does not run yet."""
    from hpctrain.engines.horovod import create

    return create(world.comm, world.device, watch=watch, options=options, timeout_s=timeout_s)


def make_torch(
    world: World, *, watch: Watchdog | None, options: HorovodOptions | None, timeout_s: float
) -> Engine:
    """Collective: over torch.distributed."""
    from hpctrain.engines.torch_dist import TorchEngine

    return TorchEngine(world.comm, world.device, watch=watch, timeout_s=timeout_s)
