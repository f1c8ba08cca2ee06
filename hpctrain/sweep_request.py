"""What a sweep (`hpctrain bench`) requires of a script, and how the script reads it. Pure.

A sweep starts the script again and again, with other ranks, batches and settings, and says so in
one variable. `hpctrain.init` hands what it says to the world as `world.bench`; outside a sweep the
world gives the script's own defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.errors import ConfigError, LaunchError
from hpctrain.world import Setting

if TYPE_CHECKING:
    from hpctrain.world import Launch, World

__all__ = ["BENCH_VARIABLE", "Bench", "SweepRequest", "parse_request", "request_of", "sweep_of"]

BENCH_VARIABLE = "HPCTRAIN_BENCH"
_FLAGS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRequest:
    """The request of one launch of a sweep."""

    report: str
    """The file that rank 0 writes the step times to."""
    batch: int | None = None
    """Samples of one share, instead of the script's default."""
    factor: int = 1
    """How many shares the ranks have together: their number in weak scaling, 1 in strong."""
    engine: str | None = None
    """Instead of `auto`."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Settings that the sweep varies."""
    warmup: int = 3
    """Steps that do not count."""
    steps: int = 20
    """Steps that count, after which the script ends; 0: it runs to its own end."""

    def text(self) -> str:
        """As it stands in the environment."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**fields, "values": dict(self.values)}, sort_keys=True)


def parse_request(text: str) -> SweepRequest:
    """Read what `SweepRequest.text` wrote. Pure.

    Raises:
        LaunchError: it is something else.
    """
    try:
        return SweepRequest(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise LaunchError(
            f"{BENCH_VARIABLE} is not in the format of `hpctrain bench` ({error}); unset it"
        ) from None


def request_of(launch: Launch) -> SweepRequest | None:
    """The request of the sweep that started this process; None outside a sweep. Pure.

    Raises:
        LaunchError: its variable holds something else.
    """
    text = launch.settings.get(BENCH_VARIABLE)
    return None if text is None else parse_request(text)


def sweep_of(world: World) -> Bench | None:
    """The sweep that a world is part of; None outside a sweep."""
    return world.bench if isinstance(world.bench, Bench) else None


class Bench:
    """What a script reads from its sweep; `world.bench`.

    Args:
        asked: The sweep's request.
    """

    is_active = True
    """Whether a sweep has started this script."""

    def __init__(self, asked: SweepRequest) -> None:
        self.asked = asked
        self.reads: set[str] = set()
        """What the script has read, so that the sweep can report settings without effect."""
        self.batch: int | None = None
        """The global batch last returned to the script."""
        self._has_replica = False

    def take_replica(self) -> bool:
        """Whether a replica is the first one; that one is timed, where a script has several."""
        first, self._has_replica = not self._has_replica, True
        return first

    def global_batch(self, default: int) -> int:
        """Samples of all ranks together in a step.

        Args:
            default: The script's own. In a weak-scaling sweep that names no batch it is one rank's
                share; in a strong-scaling one it is the whole.
        """
        self.reads.add("batch")
        self.batch = (self.asked.batch or default) * self.asked.factor
        return self.batch

    def value(self, name: str, default: Setting) -> Setting:
        """A setting that the sweep may vary, in the type of the default.

        Raises:
            ConfigError: the sweep's value is not of that type.
        """
        self.reads.add(name)
        text = self.asked.values.get(name)
        if text is None:
            return default
        try:
            return type(default)(_FLAGS[text.lower()] if isinstance(default, bool) else text)
        except (KeyError, ValueError):
            raise ConfigError(
                f"the sweep's {name}={text!r} is not of the type {type(default).__name__} of the "
                f"script's default {default!r}; vary it over values of that type"
            ) from None
