"""When to save and when to stop, from what steps and saves have cost so far. Pure: no clock.

Saving too often wastes time, too rarely loses work. Daly's estimate of the best interval needs the
cost of a save and the mean time between failures. The last save before the walltime must be
complete before it: time is kept for the slowest save and step seen, not for the usual ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import ConfigError
from hpctrain.log import format_seconds

__all__ = ["Governor", "Pace", "daly_interval_s", "quantile"]

_STEPS_KEPT = 128
_SAVES_KEPT = 16
_FIRST_SAVE_AFTER_S = 300.0
"""The cost of a save should be measured early."""
_SHORT = 0.1
_STEPS_AHEAD = 2
"""The step that is under way, and the one until all ranks know (see `faults.boundary`)."""


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The time between saves that loses least, by J. T. Daly's higher-order estimate (2006).

    Args:
        cost_s: What a save costs the training.
        mtbf_s: Mean time between failures of the whole job.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of sorted values that at least this share of them does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What the governor goes by.

    Raises:
        ConfigError: a time is not positive, or the margin below 1.
    """

    every_s: float | None = None
    """Seconds between saves; None chooses them by the mean time between failures."""
    mtbf_s: float = 24 * 3600.0
    """Mean time between failures of the whole job, not of a node."""
    lead_s: float = 60.0
    """Time reserved at the end besides the save, for exiting and for the job script; at most a
    tenth of a short job."""
    first_save_s: float = 60.0
    """Estimated time of a save until one was made; at most a tenth of a short job."""
    margin: float = 1.5
    """The next save may take this many times the slowest recent one."""
    shortest_s: float = 10.0
    """Never less than this between saves."""

    def __post_init__(self) -> None:
        """Refuse times that are none."""
        for name in ("every_s", "mtbf_s", "first_save_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r} must be more than 0 and finite")
        if not (self.lead_s >= 0 and self.shortest_s >= 0):
            raise ConfigError(
                f"lead_s={self.lead_s!r} and shortest_s={self.shortest_s!r} must not be negative"
            )
        if not self.margin >= 1:
            raise ConfigError(f"margin={self.margin!r} must be at least 1")


class Governor:
    """Decides when a checkpoint is due and when the training must stop.

    It gets the durations of steps and saves and the current time; any monotonic clock will do. One
    rank decides and the others get the decision at the step boundary.

    Args:
        pace: What to go by.
        now_s: When the training began.
    """

    def __init__(self, pace: Pace | None = None, *, now_s: float = 0.0) -> None:
        self.pace = pace or Pace()
        self._steps: deque[float] = deque()
        self._by_length: list[float] = []  # the same, sorted: read after every step
        self._saves: deque[float] = deque(maxlen=_SAVES_KEPT)
        self._costs: deque[float] = deque(maxlen=_SAVES_KEPT)
        self._saved_at = now_s
        self._span_s = math.inf

    def step_took(self, seconds: float) -> None:
        """A step ended, from boundary to boundary, on the slowest rank."""
        if len(self._steps) == _STEPS_KEPT:
            del self._by_length[bisect_left(self._by_length, self._steps.popleft())]
        self._steps.append(seconds)
        insort(self._by_length, seconds)

    def save_took(self, seconds: float, *, blocked_s: float | None = None) -> None:
        """A save is on disk.

        Args:
            seconds: From its begin until it was complete.
            blocked_s: How long the training stood still for it; None: all the time.
        """
        self._saves.append(seconds)
        self._costs.append(seconds if blocked_s is None else blocked_s)

    def saved(self, now_s: float) -> None:
        """A save began: the interval counts from here."""
        self._saved_at = now_s

    @property
    def step_s(self) -> float:
        """A usual step; 0 before the first."""
        return quantile(self._by_length, 0.5) if self._steps else 0.0

    @property
    def slow_step_s(self) -> float:
        """A slow step: one in fifty is slower; 0 before the first."""
        return quantile(self._by_length, 0.98) if self._steps else 0.0

    @property
    def save_s(self) -> float:
        """The slowest of the last saves, or what was assumed."""
        return max(self._saves, default=min(self.pace.first_save_s, _SHORT * self._span_s))

    @property
    def interval_s(self) -> float:
        """Seconds between the begins of saves."""
        if self.pace.every_s is not None:
            return self.pace.every_s
        cost_s = quantile(sorted(self._costs), 0.5) if self._costs else self.save_s
        best_s = daly_interval_s(cost_s, self.pace.mtbf_s) + cost_s
        if not self._costs:
            best_s = min(best_s, _FIRST_SAVE_AFTER_S)
        # A save that is still being written would hold the next one up.
        return max(best_s, self.save_s, self.pace.shortest_s)

    @property
    def reserve_s(self) -> float:
        """How much time must be left when the last step ends."""
        return min(self.pace.lead_s, _SHORT * self._span_s) + self.pace.margin * self.save_s

    def save_is_due(self, now_s: float) -> bool:
        """Whether it is time for a save: waiting another step would be further from the moment."""
        return now_s - self._saved_at + self.step_s / 2 >= self.interval_s

    def must_stop(self, time_left_s: float | None, *, save_due: bool = False) -> bool:
        """Whether this is the last boundary that is safe: another step might not leave the reserve.

        A save that is due takes its time before the next boundary; stopping saves as well. None,
        for no limit, never stops. Nor does a training stop before its first step: a job that is
        requeued without progress would repeat forever. The first time passed here counts as
        the job's: of a short one less is kept for its end.
        """
        if time_left_s is None:
            return False
        if self._span_s == math.inf:
            self._span_s = time_left_s
        if not self._steps:
            return False
        ahead_s = _STEPS_AHEAD * self.slow_step_s + (self.save_s if save_due else 0.0)
        return time_left_s - ahead_s < self.reserve_s

    def describe(self, time_left_s: float | None = None) -> str:
        """What was measured, and what is done about it, in plain words."""
        step = f"a step takes {format_seconds(self.step_s)}" if self._steps else "no step yet"
        if self._steps and self.slow_step_s > 1.2 * self.step_s:
            step += f" (a slow one {format_seconds(self.slow_step_s)})"
        kind = "a save takes up to" if self._saves else "a save is estimated to take"
        parts = [step, f"{kind} {format_seconds(self.save_s)}"]
        often = f"one every {format_seconds(self.interval_s)}"
        if self.pace.every_s is None:
            mtbf = format_seconds(self.pace.mtbf_s)
            often += f", optimal for one failure in {mtbf}"
        parts.append(often)
        if time_left_s is not None:
            stop_s = max(time_left_s - self.reserve_s - _STEPS_AHEAD * self.slow_step_s, 0.0)
            parts.append(
                f"{format_seconds(time_left_s)} left: stops in {format_seconds(stop_s)}, keeping "
                f"{format_seconds(self.reserve_s)} for the last save"
            )
        return "; ".join(parts)
