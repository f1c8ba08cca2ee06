"""Schedules that look at a metric: they step after evaluations. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.train.monitor import Monitor

__all__ = ["MetricSchedules", "wants_metric"]


def wants_metric(schedule: Any) -> bool:
    """Whether a schedule must be given a metric to step, as ReduceLROnPlateau must."""
    try:
        inspect.signature(schedule.step).bind()
    except TypeError:
        return True
    except ValueError:  # written in C: it does not say
        return False
    return False


class MetricSchedules:
    """Those of a trainer's schedules that step after every evaluation.

    All ranks have the same results of an evaluation, so all step alike.

    Args:
        schedules: All schedules of a trainer, by the name of their replica.
        metric: The result that they look at; None: the monitor's.
        monitor: Which results are better.

    Raises:
        ConfigError: a schedule looks at the monitor's metric and takes worse for better.
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
