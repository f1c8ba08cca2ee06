"""Where the time of a training step goes: one clock that is told what begins. Pure.

All of a step's time belongs to some phase here, as a sweep needs it; `hpctrain.train.timing` adds
up what was observed, since a training also evaluates, saves and logs between its steps.

| phase | from | to |
| --- | --- | --- |
| input | the end of a step, or of a backward pass that accumulates | the next forward |
| forward | `replica(x)` | `replica.backward(loss)`, the loss included |
| backward | `replica.backward(loss)` | the gradients of this rank are there |
| exchange | that moment | the average over all ranks is there, clipped: not hidden |
| update | the end of the exchange | the end of `replica.step()` |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.world import PHASES

__all__ = ["StepClock", "StepTime"]

# What time that nobody has claimed turns out to be, by what comes after it.
_BEFORE = {"forward": "input", "backward": "forward", "update": "update", "exchange": "update"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One step of one rank."""

    step_s: float
    split_s: dict[str, float]
    """By phase; sums to `step_s`."""
    num_samples: int | None
    """Of this rank; None: the script did not say."""
    sees_forward: bool
    """Whether the model was called through the replica; otherwise input is part of forward."""


class StepClock:
    """Told what begins, it adds up what each phase took.

    Args:
        now: The time in seconds.
        settle: Waits until a device has done what it was told, before the time is read.
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, settle: Callable[[], None] | None = None
    ) -> None:
        self._now = now
        self._settle = settle
        self._last = now()
        self._phase: str | None = None  # None: whose time it is will be seen
        self._split = dict.fromkeys(PHASES, 0.0)
        self._samples: int | None = 0
        self._sees_forward = False
        self._spoilt = True  # building and compiling come before the first step

    def begin(self, phase: str) -> str | None:
        """A phase begins; what came before it ends, and is told."""
        before = self._phase
        self._charge(before or _BEFORE[phase])
        self._phase = phase
        self._sees_forward = self._sees_forward or phase == "forward"
        return before

    def pause(self) -> None:
        """A phase ends, and what follows is not known yet."""
        if self._phase is not None:
            self._charge(self._phase)
            self._phase = None

    def count(self, num_samples: int | None) -> None:
        """Samples of a backward pass."""
        if num_samples is None or self._samples is None:
            self._samples = None
        else:
            self._samples += num_samples

    def spoil(self) -> None:
        """This step contains something else, such as an evaluation, and does not count."""
        self._spoilt = True

    def finish(self) -> StepTime | None:
        """A step has ended; None where it does not count."""
        self.pause()
        total = sum(self._split.values())
        done = StepTime(
            step_s=total,
            split_s=self._split,
            num_samples=self._samples,
            sees_forward=self._sees_forward,
        )
        spoilt, self._spoilt = self._spoilt, False
        self._split = dict.fromkeys(PHASES, 0.0)
        self._samples, self._sees_forward = 0, False
        return None if spoilt else done

    def _charge(self, phase: str) -> None:
        if self._settle is not None:
            self._settle()
        now = self._now()
        self._split[phase] += now - self._last
        self._last = now
