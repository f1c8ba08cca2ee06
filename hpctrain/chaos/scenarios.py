"""What can be done to a training, and what is expected of it then. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import ConfigError
from hpctrain.exit_codes import DIED, REQUEUE

__all__ = ["SCENARIOS", "Kind", "Scenario", "choose", "patterns"]

Kind = Literal["rank-signal", "launcher-signal", "bit", "nan", "disk", "truncate", "byte", "pause"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One disturbance of a training."""

    name: str
    kind: Kind
    done: str
    expected: str
    code: int
    words: tuple[str, ...]
    """Patterns that its output must match; {rank}, {next}, {bad}, {before}, {n} are filled in."""
    limit_s: float = 30.0
    """Time from the disturbance to the exit of all processes."""
    signal: str = ""


def _signals() -> list[Scenario]:
    return [
        Scenario(
            name=f"{name[3:].lower()}-{whom}",
            kind="rank-signal" if whom == "rank" else "launcher-signal",
            done=f"{name} to one rank" if whom == "rank" else f"{name} to the launcher",
            expected=f"saved, exit code {REQUEUE}",
            code=REQUEUE,
            words=(f"got {name}; saved step",)
            + ((r"rank {rank} got",) if whom == "rank" else (f"{name} passed on to {{n}} ranks",)),
            signal=name,
        )
        for name in ("SIGUSR2", "SIGUSR1", "SIGTERM")
        for whom in ("rank", "launcher")
    ]


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="kill",
            kind="rank-signal",
            done="SIGKILL to one rank",
            expected=f"rank named, exit code {DIED} within 10 s",
            code=DIED,
            words=(r"rank {rank} (of \d+ )?on \S+",),
            limit_s=10.0,
            signal="SIGKILL",
        ),
        Scenario(
            name="bit",
            kind="bit",
            done="a bit of a weight flipped on one rank",
            expected="parameter, rank and step named, exit code 1",
            code=1,
            words=(r"DriftError: .*step {next}", r"rank[s]? [\d, -]*{rank}"),
        ),
        Scenario(
            name="nan",
            kind="nan",
            done="NaN in a weight of one rank",
            expected="rank and step named, exit code 1",
            code=1,
            words=(r"NonFiniteError: .*NaN at step {next} on rank {rank} of {n}",),
        ),
        Scenario(
            name="disk",
            kind="disk",
            done="disk full",
            expected="error at the next boundary, exit code 1",
            code=1,
            words=(r"No space left on device|File too large",),
        ),
        *_signals(),
        Scenario(
            name="truncate",
            kind="truncate",
            done="newest checkpoint cut in half",
            expected="refused by name, the one before used",
            code=REQUEUE,
            words=("{bad}", "resuming from step {before} "),
        ),
        Scenario(
            name="byte",
            kind="byte",
            done="a byte of the newest checkpoint changed",
            expected="refused by name, the one before used",
            code=REQUEUE,
            words=("{bad}", "resuming from step {before} "),
        ),
        Scenario(
            name="pause",
            kind="pause",
            done="one rank stopped for 2 s, then continued",
            expected="the others wait, the run succeeds",
            code=0,
            words=(),
            limit_s=600.0,
        ),
    )
}
"""By name, in execution order; the last one lets the run finish."""


def choose(names: Sequence[str] | None) -> list[Scenario]:
    """Scenarios by name, in their order; None: all of them.

    Raises:
        ConfigError: there is no such scenario.
    """
    if names is None:
        return list(SCENARIOS.values())
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown or not names:
        raise ConfigError(
            f"no scenario is called {', '.join(unknown) or 'nothing'}; there are "
            f"{', '.join(SCENARIOS)}"
        )
    return [scenario for name, scenario in SCENARIOS.items() if name in names]


def patterns(scenario: Scenario, **values: object) -> list[str]:
    """What to look for, with this run's ranks, steps and names."""
    filled = list(scenario.words)
    for name, value in values.items():
        filled = [word.replace(f"{{{name}}}", re.escape(str(value))) for word in filled]
    return filled
