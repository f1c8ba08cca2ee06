"""Which engine goes with a `HorovodTraining`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.replica.horovod_settings import HorovodTraining

__all__ = ["choose_engine"]


def choose_engine(
    engine: str | Engine, settings: HorovodTraining | None, *, bucket_bytes: int | None
) -> str | Engine:
    """The engine to use with these settings. Pure.

    `auto` becomes `horovod`, since that is what the settings are for.

    Raises:
        ConfigError: the arguments do not go together.
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
    return "horovod"
