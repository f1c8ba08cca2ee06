"""How far a run is, which evaluation was best, and what follows from it. Pure."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.log import format_done

__all__ = ["MetricSchedules", "Monitor", "Progress", "RunState", "wants_metric"]


class Progress:
    """Counts that are the same on all ranks, and that go into every checkpoint."""

    def __init__(self) -> None:
        self.step = 0
        self.epochs_done = 0
        self.samples = 0
        self.seq = 0
        """Lines of metrics.jsonl that have been measured."""
        self.results: dict[str, float] = {}
        """What the last evaluation measured."""
        self.evaluated_step: int | None = None
        self.stop_reason: str | None = None
        self.began_with = 0
        """Samples before this job."""
        self.began_at = 0
        """Steps before this job."""

    @property
    def job_samples(self) -> int:
        """Samples of this job."""
        return self.samples - self.began_with

    @property
    def job_steps(self) -> int:
        """Steps of this job."""
        return self.step - self.began_at

    @property
    def fresh_results(self) -> dict[str, float]:
        """What is known of the weights as they are now; empty where that is nothing."""
        return self.results if self.evaluated_step == self.step else {}

    def is_done(self, *, epochs: int | None, steps: int | None) -> bool:
        """Whether the goal is reached, or `stop` was called."""
        return (
            self.stop_reason is not None
            or (steps is not None and self.step >= steps)
            or (epochs is not None and self.epochs_done >= epochs)
        )

    def describe_end(self, *, epochs: int | None, steps: int | None) -> str:
        """Say that the run is complete, and how to extend it."""
        if self.stop_reason is not None:
            why, more = self.stop_reason, "allow more of them"
        elif steps is not None and self.step >= steps:
            why, more = format_done(self.step, steps, "steps"), "raise steps"
        else:
            why, more = format_done(self.epochs_done, epochs, "epochs"), "raise epochs"
        return (
            f"nothing is left to do: {why}; {more} to train further, or give another run directory "
            "to start a new run"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "step": self.step,
            "epochs_done": self.epochs_done,
            "samples": self.samples,
            "seq": self.seq,
            "results": dict(self.results),
            "evaluated_step": self.evaluated_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved values."""
        self.step = self.began_at = int(state["step"])
        self.epochs_done = int(state["epochs_done"])
        self.samples = self.began_with = int(state["samples"])
        self.seq = int(state["seq"])
        self.results = {str(name): float(value) for name, value in state["results"].items()}
        evaluated = state["evaluated_step"]
        self.evaluated_step = None if evaluated is None else int(evaluated)


class Monitor:
    """Remembers the best value of one metric.

    Args:
        what: `min:NAME` or `max:NAME`.
        patience: Evaluations in a row without a better one after which to stop; None: never.
        min_delta: The smallest improvement that counts.
    """

    def __init__(
        self, what: str = "min:loss", *, patience: int | None = None, min_delta: float = 0.0
    ) -> None:
        way, _, name = what.partition(":")
        if way not in ("min", "max") or not name:
            raise ConfigError(f"monitor={what!r} must be min:NAME or max:NAME of a metric")
        if patience is not None and patience < 1:
            raise ConfigError(f"patience={patience} must be at least 1, or None")
        if not 0 <= min_delta < math.inf:
            raise ConfigError(f"min_delta={min_delta} must be at least 0")
        self.name, self.way = name, way
        self._sign = 1.0 if way == "min" else -1.0
        self._patience = patience
        self._min_delta = min_delta
        self.best: float | None = None
        self.best_step = 0
        self.num_worse = 0
        """Evaluations since the best one."""

    def judge(self, metrics: Mapping[str, float], *, step: int) -> bool:
        """Record an evaluation and return whether it is the best so far; NaN never is.

        Raises:
            ConfigError: it has no such metric.
        """
        if self.name not in metrics:
            raise ConfigError(
                f"monitor: the evaluation has no {self.name!r}; it has {', '.join(metrics)}"
            )
        value = metrics[self.name]
        bound = math.inf if self.best is None else self._sign * self.best - self._min_delta
        if self._sign * value < bound:
            self.best, self.best_step, self.num_worse = value, step, 0
            return True
        self.num_worse += 1
        return False

    @property
    def is_exhausted(self) -> bool:
        """Whether patience is used up."""
        return self._patience is not None and self.num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"best": self.best, "best_step": self.best_step, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved values."""
        self.best, self.best_step = state["best"], int(state["best_step"])
        self.num_worse = int(state["num_worse"])


class RunState:
    """How far a run is and what was best, as one part of a saver.

    Args:
        progress: How far.
        monitor: What was best, for early stopping.
        best: What was best, for the checkpoint that is kept; None where none is.
    """

    def __init__(self, progress: Progress, monitor: Monitor, best: Monitor | None) -> None:
        self._progress, self._monitor, self._best = progress, monitor, best

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the same on every rank."""
        return {
            "progress": self._progress.state_dict(),
            "monitor": self._monitor.state_dict(),
            "best": None if self._best is None else self._best.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved values."""
        self._progress.load_state_dict(state["progress"])
        self._monitor.load_state_dict(state["monitor"])
        if self._best is not None and state["best"] is not None:
            self._best.load_state_dict(state["best"])


def wants_metric(schedule: Any) -> bool:
    """Whether a schedule must be given a metric to step, as ReduceLROnPlateau must."""
    try:
        inspect.signature(schedule.step).bind()
    except TypeError:
        return True
    except ValueError:  # written in C, without a signature
        return False
    return False


class MetricSchedules:
    """Those of a trainer's schedules that step after every evaluation.

    All ranks have the same results of an evaluation, so all make the same step.

    Args:
        schedules: All schedules of a trainer, by the name of their replica.
        metric: The result that they follow; None: the monitor's.
        monitor: Which results are better.

    Raises:
        ConfigError: a schedule follows the monitor's metric in the opposite direction.
    """

    def __init__(
        self, schedules: Mapping[str, Any], *, metric: str | None, monitor: Monitor
    ) -> None:
        self._chosen = {name: one for name, one in schedules.items() if wants_metric(one)}
        self.metric = metric or monitor.name
        for schedule in self._chosen.values():
            mode = getattr(schedule, "mode", monitor.way)
            if self.metric == monitor.name and mode != monitor.way:
                raise ConfigError(
                    f'{type(schedule).__name__} has mode="{mode}", and of {self.metric} the '
                    f'monitor says "{monitor.way}"; make them agree, or name another metric '
                    "(schedule_metric, in a file schedule.metric)"
                )
            for group in schedule.optimizer.param_groups:
                # As torch's other schedules do: the rate is a schedule's from here on.
                group.setdefault("initial_lr", group["lr"])

    def describe(self) -> str | None:
        """What they are; None where there are none."""
        return ", ".join(type(one).__name__ for one in self._chosen.values()) or None

    def __bool__(self) -> bool:
        return bool(self._chosen)

    def __contains__(self, schedule: Any) -> bool:
        return any(schedule is one for one in self._chosen.values())

    def step(self, results: Mapping[str, float]) -> None:
        """After an evaluation."""
        for schedule in self._chosen.values():
            schedule.step(results[self.metric])
