"""Which evaluation was the best, and whether to go on. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpctrain.errors import ConfigError

__all__ = ["Monitor"]


class Monitor:
    """Remembers the best value of one metric.

    Args:
        what: `min:NAME` or `max:NAME`.
        patience: Evaluations in a row without a better one after which to stop; None: never.
        min_delta: By how much better must be better.
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
        """Take in an evaluation; whether it is the best so far. NaN never is.

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
        """Whether patience is."""
        return self._patience is not None and self.num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"best": self.best, "best_step": self.best_step, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved values."""
        self.best, self.best_step = state["best"], int(state["best_step"])
        self.num_worse = int(state["num_worse"])
