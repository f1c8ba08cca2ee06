"""How far a run is, in one line. Pure, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Standing", "Ticker", "duration", "ending_line", "evaluation_line", "status_line"]

_FIRST_S = 5.0
_LONGEST_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a run is."""

    step: int
    epoch: int
    num_steps: int | None = None
    num_epochs: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    """Of this job, on average."""
    left_s: float | None = None
    """Time left in the allocation."""
    slowest: tuple[int, float] | None = None
    """The slowest rank, and how many times as long as the median its steps take."""

    @property
    def eta_s(self) -> float | None:
        """How long the rest will take."""
        if self.num_steps is None or self.step_s is None:
            return None
        return max(0, self.num_steps - self.step) * self.step_s


def status_line(standing: Standing) -> str:
    """The line that a log or a terminal shows."""
    parts = [
        f"epoch {standing.epoch}" + (f"/{standing.num_epochs}" if standing.num_epochs else ""),
        f"step {standing.step}" + (f"/{standing.num_steps}" if standing.num_steps else ""),
    ]
    if standing.loss is not None:
        parts.append(f"loss {standing.loss:.4g}")
    if standing.learning_rate is not None:
        parts.append(f"lr {standing.learning_rate:.3g}")
    if standing.gradient_norm is not None:
        parts.append(f"gradient norm {standing.gradient_norm:.3g}")
    if standing.samples_per_s is not None:
        parts.append(f"{standing.samples_per_s:,.0f} samples/s")
    if standing.eta_s is not None:
        parts.append(f"ETA {duration(standing.eta_s)}")
    if standing.left_s is not None:
        parts.append(f"{duration(standing.left_s)} left in the allocation")
    if standing.slowest is not None:
        parts.append(f"slowest rank {standing.slowest[0]} ({standing.slowest[1]:.2f}x)")
    return ", ".join(parts)


def evaluation_line(line: Mapping[str, Any]) -> str:
    """What an evaluation measured."""
    fixed = ("kind", "step", "epoch", "time_s", "wall", "seq", "best", "seconds")
    numbers = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} not finite"
        for name, value in line.items()
        if name not in fixed
    )
    best = " (best so far)" if line.get("best") else ""
    return f"evaluation at step {line['step']}: {numbers}{best}"


def ending_line(summary: Mapping[str, Any]) -> str:
    """How a run ended: its steps and its time over all jobs, and those of a job that resumed it."""
    steps, job_steps = int(summary["steps"]), int(summary["job_steps"])
    text = f"{summary['state']} after {steps} steps in {duration(float(summary['seconds']))}"
    if steps != job_steps:
        text += f", of which {job_steps} in this job's {duration(float(summary['job_seconds']))}"
    return text


class Ticker:
    """When a plain log says something: soon at first, then ever more rarely, up to every 600 s."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._first = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether to say something now; then it counts as said."""
        if self._last is None:
            self._first = self._last = now_s
            return True
        wait = min(_LONGEST_S, max(_FIRST_S, (now_s - self._first) / 10))
        if now_s - self._last < wait:
            return False
        self._last = now_s
        return True


def duration(seconds: float) -> str:
    """Seconds for people: `42s`, `3m20s`, `5h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
