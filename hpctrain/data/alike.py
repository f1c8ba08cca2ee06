"""Arguments that must be equal on all ranks, compared before anything moves."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.errors import ConfigError
from hpctrain.log import format_ranges
from hpctrain.world import World, roll_call

__all__ = ["require_alike"]


def require_alike(
    world: World, call: str, settings: Mapping[str, object], *, timeout_s: float
) -> None:
    """Collective: refuse settings that differ between ranks; `call` must match.

    Raises:
        ConfigError: on all ranks, with the setting, its values and the ranks.
        CollectiveError: some ranks did not come.
    """
    roll_call(world.comm, call, timeout_s=timeout_s)
    told = world.comm.allgather(dict(settings))
    for name, first in told[0].items():
        others = [rank for rank, given in enumerate(told) if given[name] != first]
        if others:
            raise ConfigError(
                f"{call}: {name} is {told[others[0]][name]!r} on rank "
                f"{format_ranges(others, limit=16)} and {first!r} on rank 0; it must be the same "
                "on all ranks"
            )
