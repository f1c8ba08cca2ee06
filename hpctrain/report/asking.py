"""How long a training takes on each number of ranks, and what to ask for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.bench.curves import LIMIT
from hpctrain.errors import ConfigError
from hpctrain.report.points import Point, Study

__all__ = ["Ask", "Wish", "choose_ask", "hours_text", "price"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is to be trained."""

    num_samples: float
    """Samples over all epochs."""
    reserve: float = 0.25
    """What is asked for beyond what was computed: queues, restarts and mistakes take it."""
    runs: int = 1
    """How many trainings: seeds, searches, ablations."""

    def __post_init__(self) -> None:
        """Refuse what cannot be priced."""
        if self.num_samples <= 0:
            raise ConfigError(f"--samples {self.num_samples:g} must be above 0")
        if self.reserve < 0:
            raise ConfigError(f"--reserve {self.reserve:g} must not be below 0")
        if self.runs < 1:
            raise ConfigError(f"--runs {self.runs} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What one point would cost."""

    point: Point
    hours: float
    """Of one training, without the reserve."""
    node_hours: float
    """Of all trainings, with the reserve."""
    core_hours: float
    is_proposed: bool = False
    """Whether it is the one to ask for."""


def price(study: Study, wish: Wish) -> list[Ask]:
    """Every measured point of a study, priced, one process on a node among them; one is proposed.

    Only what was measured is priced: `hpctrain plan` predicts the rest.
    """
    alone = [point for point in study.asides if point.step_s is not None]
    every = [*alone, *sorted(study.measured, key=lambda p: (p.num_ranks, p.engine))]
    asks = []
    for point in every:
        speed = point.samples_per_s
        if speed is None:
            continue
        hours = wish.num_samples / speed / 3600
        total = hours * wish.runs * (1 + wish.reserve)
        asks.append(
            Ask(
                point=point,
                hours=hours,
                node_hours=total * point.num_nodes,
                core_hours=total * point.num_ranks * point.num_threads,
            )
        )
    chosen = choose_ask([(ask.hours, ask.node_hours) for ask in asks])
    return [replace(ask, is_proposed=place == chosen) for place, ask in enumerate(asks)]


def choose_ask(costs: Sequence[tuple[float, float]]) -> int | None:
    """Which of several (hours, node-hours) to ask for: the fastest that is not much dearer.

    Efficiency counts against what is paid for, and that is nodes: up to 1 / 0.8 times the fewest
    node-hours are accepted for a shorter training. So nothing that is both faster and cheaper than
    the choice is left aside.
    """
    if not costs:
        return None
    most = min(node_hours for _, node_hours in costs) / LIMIT
    good = [place for place, (_, node_hours) in enumerate(costs) if node_hours <= most]
    return min(good, key=lambda place: costs[place])


def hours_text(hours: float) -> str:
    """A time as people say it."""
    seconds = 3600 * hours
    if seconds < 90:
        return f"{seconds:.3g} s"
    if seconds < 5400:
        return f"{seconds / 60:.3g} min"
    if hours < 100:
        return f"{hours:.3g} h"
    return f"{hours / 24:.3g} days"
