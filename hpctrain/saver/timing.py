"""When checkpoints are due: by time, by the cost of failures, by steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import ConfigError
from hpctrain.faults import Governor, Pace

__all__ = ["SaveClock", "Timing", "check_timing"]

_FIRST_AFTER_S = 60.0
"""The first save comes early, to measure what a save costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The user's request."""

    pace: Pace
    by_time: bool
    every_steps: int | None

    def save_is_due(
        self, governor: Governor, now_s: float, *, running_s: float, num_saves: int
    ) -> bool:
        """Whether rank 0's clock says so.

        Args:
            governor: What steps and saves have taken.
            now_s: By the governor's clock.
            running_s: How long this job has run.
            num_saves: Saves in this job.
        """
        if not self.by_time:
            return False
        learns = self.pace.every_s is None and num_saves == 0 and running_s >= _FIRST_AFTER_S
        return learns or governor.save_is_due(now_s)

    def is_due_by_count(self, step: int) -> bool:
        """Whether the number of steps says so; all ranks know it by themselves."""
        return self.every_steps is not None and step > 0 and step % self.every_steps == 0


class SaveClock:
    """Reports to the governor how long saves take, as soon as they are complete."""

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self._under_way: tuple[float, float] | None = None

    def began(self, began_s: float, now_s: float) -> None:
        """A save was begun; training continues now."""
        self._under_way = (began_s, now_s - began_s)

    def look(self, now_s: float, *, is_saving: bool) -> None:
        """See whether it is complete."""
        if self._under_way is not None and not is_saving:
            began_s, blocked_s = self._under_way
            self._governor.save_took(now_s - began_s, blocked_s=blocked_s)
            self._under_way = None


def check_timing(
    every_s: float | Literal["auto"] | None,
    every_steps: int | None,
    mtbf_hours: float,
    lead_s: float,
) -> Timing:
    """Check the request.

    Raises:
        ConfigError: a time or number is impossible.
    """
    if isinstance(every_s, str) and every_s != "auto":
        raise ConfigError(f"every_s={every_s!r} is neither seconds nor 'auto'")
    if every_steps is not None and (isinstance(every_steps, bool) or every_steps < 1):
        raise ConfigError(f"every_steps={every_steps!r} must be at least 1")
    if not mtbf_hours > 0:
        raise ConfigError(f"mtbf_hours={mtbf_hours!r} must be more than 0")
    pace = Pace(
        every_s=every_s if isinstance(every_s, (int, float)) else None,
        mtbf_s=mtbf_hours * 3600.0,
        lead_s=lead_s,
    )
    return Timing(pace=pace, by_time=every_s is not None, every_steps=every_steps)
