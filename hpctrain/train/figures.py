"""The figures of a logging interval over all ranks: losses by samples, times by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from hpctrain.errors import ConfigError
from hpctrain.replica import Step
from hpctrain.train.timing import StepTimer
from hpctrain.world import World, agree

__all__ = ["Figures", "Interval", "describe_steps", "summarise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What all ranks know of an interval."""

    numbers: dict[str, float]
    """Means over the samples of all ranks in the last batch, NaN where there were none."""
    step_s: float
    samples_per_s: float
    split: dict[str, float]
    """Seconds of each phase a step, on average over ranks; empty where nobody measures."""
    slowest: tuple[int, float] | None
    """The rank that worked longest, and how many times as long as the median."""
    nonfinite: dict[str, list[int]]
    """Numbers that were inf or NaN, and on which ranks."""


class Interval:
    """What one rank has seen since the last line.

    Args:
        timer: Who measures phases, where somebody does.
    """

    def __init__(self, timer: StepTimer | None) -> None:
        self._timer = timer
        self._numbers: dict[str, Any] = {}
        self._weight = 0
        self._num_steps = 0
        self._num_samples = 0
        self._busy_s = 0.0

    def saw(self, numbers: Mapping[str, Any], *, num_samples: int, global_samples: int) -> None:
        """A batch: its figures stay on the device until they are asked for."""
        self._numbers, self._weight = dict(numbers), num_samples
        self._num_samples += global_samples

    def stepped(self, took_s: float) -> None:
        """A step was made in so many seconds."""
        self._num_steps += 1
        self._busy_s += took_s

    def close(self, world: World) -> Figures:
        """Collective: the figures of all ranks; the names of numbers must match.

        Raises:
            ConfigError: on all ranks, when a number is none, or names differ.
        """
        steps = max(1, self._num_steps)
        split = {} if self._timer is None else self._timer.take()
        names, values, trouble = _read(self._numbers, empty=self._weight == 0)
        agree(world.comm, trouble, error=ConfigError)
        mine = [float(self._weight), self._busy_s / steps, *(s / steps for s in split.values())]
        told = world.comm.allgather((names, [*values], mine))
        known = next((names for names, _, mine in told if mine[0] > 0), names)
        odd = [rank for rank, (n, _, m) in enumerate(told) if m[0] > 0 and n != known]
        if odd:
            raise ConfigError(
                f"the step function returned {', '.join(told[odd[0]][0])} on rank {odd[0]} and "
                f"{', '.join(known)} elsewhere; return the same names on all ranks"
            )
        rows = [values if m[0] > 0 else [0.0] * len(known) for _, values, m in told]
        figures = summarise(
            known,
            np.asarray(rows, dtype=np.float64).reshape(world.size, len(known)),
            np.asarray([m for _, _, m in told], dtype=np.float64),
            phases=tuple(split),
            samples_a_step=self._num_samples / steps,
        )
        self._num_steps, self._num_samples, self._busy_s = 0, 0, 0.0
        return figures


def summarise(
    names: list[str],
    values: np.ndarray,
    told: np.ndarray,
    *,
    phases: tuple[str, ...],
    samples_a_step: float,
) -> Figures:
    """Put the figures of all ranks together. Pure.

    Args:
        names: Of the numbers.
        values: By rank and name.
        told: By rank: samples in the last batch, seconds a step, seconds of each phase.
        phases: Names of the phases.
        samples_a_step: Over all ranks.
    """
    weights, step_s = told[:, 0], float(told[:, 1].max())
    total = weights.sum()
    with np.errstate(invalid="ignore"):  # of NaN and inf: they are told by rank
        means = (values * weights[:, None]).sum(0) / total if total else values.sum(0) * np.nan
    wrong = {
        name: np.nonzero(~np.isfinite(values[:, place]))[0].tolist()
        for place, name in enumerate(names)
    }
    slowest = None
    split = dict(zip(phases, told[:, 2:].mean(0).tolist(), strict=True))
    if phases and len(told) > 1:
        waits = [place for place, name in enumerate(phases) if name == "exchange_s"]
        own = told[:, 2:].sum(1) - sum(told[:, 2 + place] for place in waits)
        rank, middle = int(own.argmax()), median(own.tolist())
        slowest = (rank, float(own[rank] / middle)) if middle > 0 else None
    return Figures(
        numbers=dict(zip(names, means.tolist(), strict=True)),
        step_s=step_s,
        samples_per_s=samples_a_step / step_s if step_s > 0 else 0.0,
        split=split,
        slowest=slowest,
        nonfinite={name: ranks for name, ranks in wrong.items() if ranks},
    )


def describe_steps(steps: Mapping[str, Step]) -> dict[str, float]:
    """Learning rates and gradient norms of a step, by name. Waits for the device.

    `lr` is the rate of the first parameter group; `lr_1` is that of the second where it is another
    one, and so on. `grad_norm` is the norm of the averaged gradients before clipping. Where there
    are several replicas their names come first, as in `critic.lr`.

    Args:
        steps: What each replica's last step did.
    """
    numbers: dict[str, float] = {}
    for name, done in steps.items():
        prefix = "" if len(steps) == 1 else f"{name}."
        rates = [float(rate) for rate in done.learning_rates]
        for group, rate in enumerate(rates):
            if group == 0 or rate != rates[0]:
                numbers[f"{prefix}lr_{group}" if group else f"{prefix}lr"] = rate
        norm = done.norm
        if norm is not None:
            numbers[f"{prefix}grad_norm"] = norm
    return numbers


def _read(numbers: Mapping[str, Any], *, empty: bool) -> tuple[list[str], list[float], str | None]:
    """Plain numbers by name; waits for the device."""
    names, values = list(numbers), []
    if empty:  # the loss of no samples is no number
        return names, [0.0] * len(names), None
    for name, value in numbers.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            values.append(float(value.detach()))
        elif isinstance(value, int | float):
            values.append(float(value))
        else:
            kind = type(value).__name__
            return names, [], f"the step function returned {name}, a {kind}; return one number"
    return names, values, None
