"""Which checkpoints stay. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.errors import ConfigError

__all__ = ["Candidate", "Keep", "choose_best", "choose_removals", "read_metric"]

_DIRECTIONS = ("min", "max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Which checkpoints stay when there is a new one; what any of the rules wants stays."""

    last: int = 3
    """So many of the newest. Two or more: if the newest is damaged, there is another."""
    best: str | None = None
    """`min:loss` or `max:accuracy`: the best by a metric that was given to `save`."""
    best_count: int = 1
    """So many of the best."""
    every_hours: float | None = None
    """One for each so many hours of the run, for ever."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("last", "best_count"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"{name}={number!r} must be a whole number of at least 1")
        if self.best is not None:
            read_metric(self.best)
        if self.every_hours is not None and not 0 < self.every_hours < math.inf:
            raise ConfigError(f"every_hours={self.every_hours!r} must be a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What retention needs to know of a checkpoint."""

    number: int
    saved_at: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_valid: bool = True


def choose_removals(candidates: Sequence[Candidate], keep: Keep) -> list[int]:
    """The numbers of those that go.

    Damaged ones count for nothing: as many valid ones stay as without them. They go themselves
    when as many newer valid ones are there as are kept.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.number)
    valid = [candidate for candidate in ordered if candidate.is_valid]
    newest = valid[-keep.last :]
    stay = {candidate.number for candidate in newest}
    stay |= _best(valid, keep)
    stay |= _one_every(valid, keep)
    if len(newest) < keep.last:
        stay |= {candidate.number for candidate in ordered if not candidate.is_valid}
    else:
        oldest = newest[0].number
        stay |= {c.number for c in ordered if not c.is_valid and c.number > oldest}
    return [candidate.number for candidate in ordered if candidate.number not in stay]


def read_metric(best: str) -> tuple[float, str]:
    """What to multiply a metric by so that less is better, and its name.

    Raises:
        ConfigError: it is neither `min:METRIC` nor `max:METRIC`.
    """
    direction, _, metric = best.partition(":")
    if direction not in _DIRECTIONS or not metric:
        raise ConfigError(f"best={best!r} must be min:METRIC or max:METRIC, such as min:loss")
    return (1.0 if direction == "min" else -1.0), metric


def choose_best(valid: Sequence[Candidate], best: str) -> list[int]:
    """The numbers of those that have the metric, the best first; of equals the newer."""
    sign, metric = read_metric(best)
    measured = [
        (sign * candidate.metrics[metric], -candidate.number)
        for candidate in valid
        if not math.isnan(candidate.metrics.get(metric, math.nan))
    ]
    return [-number for _, number in sorted(measured)]


def _best(valid: Sequence[Candidate], keep: Keep) -> set[int]:
    if keep.best is None:
        return set()
    return set(choose_best(valid, keep.best)[: keep.best_count])


def _one_every(valid: Sequence[Candidate], keep: Keep) -> set[int]:
    """The oldest, and each that comes so many hours after the one before it."""
    stay: set[int] = set()
    if keep.every_hours is None:
        return stay
    last = -math.inf
    for candidate in valid:
        if candidate.saved_at - last >= 3600 * keep.every_hours:
            stay.add(candidate.number)
            last = candidate.saved_at
    return stay
