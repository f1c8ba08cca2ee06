"""Which engine goes with a `HorovodTraining`, and its options, in time for Horovod's start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.engines.horovod_state import probe_horovod
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.engines.base import Engine
    from hpctrain.engines.horovod_options import HorovodOptions
    from hpctrain.replica.horovod_settings import HorovodTraining
    from hpctrain.world import World

__all__ = ["choose_engine"]


def choose_engine(
    world: World,
    engine: str | Engine,
    settings: HorovodTraining | None,
    *,
    bucket_bytes: int | None,
    timeout_s: float,
) -> str | Engine:
    """Collective where there are options: the engine to use; Horovod then runs with the options.

    `auto` becomes `horovod`, since that is what the settings are for.

    Raises:
        ConfigError: the same on all ranks; the arguments do not go together.
    """
    if settings is None:
        return engine
    name = engine if isinstance(engine, str) else engine.name
    if name not in ("auto", "horovod"):
        raise ConfigError(
            f"horovod=HorovodTraining(...) on the {name} engine; use engine='horovod', or leave it "
            "out"
        )
    if settings.fusion == "horovod" and bucket_bytes is not None:
        raise ConfigError(
            f"bucket_bytes={bucket_bytes} with fusion='horovod', which has no buckets; use "
            "HorovodOptions(fusion_threshold_bytes=...), or fusion='arena'"
        )
    if not isinstance(engine, str):
        if settings.options is not None:
            raise ConfigError(
                "HorovodTraining: options come too late for an engine that is made already; give "
                "engine='horovod', so that Horovod starts with them"
            )
        return engine
    if settings.options is not None:
        _start(world, settings.options, timeout_s)
    return "horovod"


def _start(world: World, options: HorovodOptions, timeout_s: float) -> None:
    """Collective: start Horovod with options; where it is not built, whoever connects says so."""
    if all(world.comm.allgather(probe_horovod().built)):
        from hpctrain.engines.horovod_start import start

        start(world.comm, options, timeout_s=timeout_s)
