"""Which ranks hold the others up, and which become slower: from what each step cost each rank.

In synchronous training every step lasts as long as the slowest rank's, on all ranks. What tells
them apart is the time that a rank worked, without the time that it waited for others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import ConfigError
from hpctrain.log import format_seconds, name_ranks

__all__ = ["StragglerReport", "Stragglers", "Tally", "Work"]

_SLOW = 1.2
_DRIFT = 1.15
_ERRORS = 4.0
"""How many standard errors a difference must exceed to be significant."""
_NEWS_S = 1.0
"""What a rank must have cost the others before it is reported."""
_FEW_STEPS = 10
"""Fewer are no baseline for later comparisons."""
_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the steps of a rank cost it since the last comparison."""

    mean_s: float
    error_s: float
    """The standard error of the mean; infinite where fewer than two steps were measured."""
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerReport:
    """What one comparison of all ranks showed; the same on all of them."""

    step: int
    median_s: float
    slowest: int
    slowest_s: float
    slow: tuple[int, ...]
    """Ranks significantly slower than the median by a fifth or more, slowest first."""
    drifting: tuple[int, ...]
    """Ranks that have lost 15 % against the median since the first comparison, worst first."""
    lost_s: float
    """What the worst of them has cost the others since it became slow."""
    text: str
    """A readable summary with host names."""

    @property
    def is_news(self) -> bool:
        """Whether a rank delays the others, and for long enough to matter."""
        return self.lost_s >= _NEWS_S


class Tally:
    """What this rank's steps cost it: the time between boundaries less the time it waited."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None
        self._num_steps = 0
        self._mean_s = self._squares = 0.0

    def passed(self, now_s: float, waited_s: float) -> float | None:
        """A boundary was passed; returns what the step cost, None at the first one.

        Args:
            now_s: The time.
            waited_s: How long this rank has waited for others, in all.
        """
        before, self._began = self._began, (now_s, waited_s)
        if before is None:
            return None
        worked_s = max((now_s - before[0]) - (waited_s - before[1]), 0.0)
        self._num_steps += 1
        off = worked_s - self._mean_s  # Welford's sums: no digits are lost
        self._mean_s += off / self._num_steps
        self._squares += off * (worked_s - self._mean_s)
        return worked_s

    def take(self) -> Work:
        """The steps since the last call; a mean of 0 where there were none."""
        num, mean_s = self._num_steps, self._mean_s
        error_s = math.sqrt(self._squares / (num - 1) / num) if num > 1 else math.inf
        self._num_steps, self._mean_s, self._squares = 0, 0.0, 0.0
        return Work(mean_s=mean_s, error_s=error_s, num_steps=num)


class Stragglers:
    """Compares ranks again and again. Pure: all ranks give it the same tables.

    Args:
        hosts: Of all ranks.
        slow: From how many medians on a rank is slow.
        drift: From which growth of that number on it drifts.
    """

    def __init__(self, hosts: Sequence[str], *, slow: float = _SLOW, drift: float = _DRIFT) -> None:
        if not (slow > 1 and drift > 1):
            raise ConfigError(f"slow={slow:g} and drift={drift:g} must be more than 1")
        self._hosts = tuple(hosts)
        self._slow = slow
        self._drift = drift
        self._first: tuple[int, list[float]] | None = None
        self._lost_s = [0.0] * len(self._hosts)

    def compare(self, works: Sequence[Work], *, step: int) -> StragglerReport:
        """Judge what steps cost each rank since the last comparison.

        Args:
            works: Of all ranks.
            step: The current step.
        """
        if len(works) != len(self._hosts):
            raise ConfigError(f"{len(works)} times for {len(self._hosts)} ranks")
        worked_s = [work.mean_s for work in works]
        median_s = statistics.median_low(worked_s)
        middle = works[worked_s.index(median_s)]
        ratios = [seconds / median_s if median_s > 0 else 1.0 for seconds in worked_s]
        order = sorted(range(len(ratios)), key=lambda rank: (-ratios[rank], rank))
        sure = [
            work.mean_s - median_s > _ERRORS * math.hypot(work.error_s, middle.error_s)
            for work in works
        ]
        slow = tuple(rank for rank in order if sure[rank] and ratios[rank] >= self._slow)
        growth = self._growth(ratios)
        drifting = tuple(
            sorted(
                (r for r in order if sure[r] and growth[r] >= self._drift),
                key=lambda r: (-growth[r], r),
            )
        )
        if self._first is None and min(work.num_steps for work in works) >= _FEW_STEPS:
            self._first = (step, ratios)
        for rank, work in enumerate(works):
            held_up = rank in slow or rank in drifting
            cost_s = (work.mean_s - median_s) * work.num_steps
            self._lost_s[rank] = self._lost_s[rank] + cost_s if held_up else 0.0
        return StragglerReport(
            step=step,
            median_s=median_s,
            slowest=order[0],
            slowest_s=worked_s[order[0]],
            slow=slow,
            drifting=drifting,
            lost_s=max(self._lost_s),
            text=self._tell(worked_s, ratios, order[0], slow, drifting, median_s),
        )

    def _growth(self, ratios: Sequence[float]) -> list[float]:
        """How much more of the median each rank takes than at the first comparison."""
        if self._first is None:
            return [1.0] * len(ratios)
        return [
            now / then if then > 0 else 1.0
            for now, then in zip(ratios, self._first[1], strict=True)
        ]

    def _tell(
        self,
        worked_s: Sequence[float],
        ratios: Sequence[float],
        slowest: int,
        slow: tuple[int, ...],
        drifting: tuple[int, ...],
        median_s: float,
    ) -> str:
        worst = (
            f"rank {slowest} on {self._hosts[slowest]} works longest: "
            f"{format_seconds(worked_s[slowest])} a step, {ratios[slowest]:.2f} of the median "
            f"({format_seconds(median_s)})"
        )
        parts = [worst]
        if len(slow) > 1:
            parts.append(f"also slow: {self._name(slow[1:], ratios)}")
        if drifting and self._first is not None:
            step, then = self._first
            told = [
                f"rank {rank} on {self._hosts[rank]} from {then[rank]:.2f} to {ratios[rank]:.2f}"
                for rank in drifting[:_MOST_NAMED]
            ]
            parts.append(f"slower against the median since step {step}: {', '.join(told)}")
        return "; ".join(parts)

    def _name(self, ranks: Sequence[int], ratios: Sequence[float]) -> str:
        """Ranks by host: a slow node is one thing, not eight."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._hosts[rank], []).append(rank)
        named = [
            f"{name_ranks(own)} on {host} ({max(ratios[rank] for rank in own):.2f})"
            for host, own in list(by_host.items())[:_MOST_NAMED]
        ]
        more = len(by_host) - len(named)
        return ", ".join(named) + (f" and {more} more hosts" if more > 0 else "")
