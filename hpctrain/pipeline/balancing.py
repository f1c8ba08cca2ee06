"""Which layers make which stage: the slowest stage as fast as it can be. Pure.

A pipeline is as fast as its slowest stage. Layers stay in their order, so the stages are found
exactly, by dynamic programming, in the time of `num_stages * num_layers**2`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpctrain.errors import ConfigError
from hpctrain.log import format_bytes

__all__ = ["LayerCost", "balance_stages"]

_Fits = Callable[[int, int], bool]


class LayerCost(NamedTuple):
    """What one layer costs the stage that has it."""

    seconds: float
    """Of forward and backward on one micro-batch."""
    num_bytes: int = 0
    """Of weights, gradients, state and activations."""


def balance_stages(
    costs: Sequence[LayerCost], num_stages: int, *, limit_bytes: int | None = None
) -> tuple[range, ...]:
    """Cut a chain of layers so that the slowest stage is as fast as possible.

    Of several such cuts, the one whose largest stage has the fewest bytes; of several such, the one
    that cuts earliest, so that everyone who computes this gets the same.

    Args:
        costs: Of each layer, in their order.
        num_stages: How many stages; each gets at least one layer.
        limit_bytes: The most bytes that a stage may have; None: any number.

    Returns:
        By stage: its layers.

    Raises:
        ConfigError: there are fewer layers than stages, a cost is no number of at least 0, or no
            cut keeps every stage within `limit_bytes`.
    """
    _check(costs, num_stages)
    times = _sums([cost.seconds for cost in costs])
    sizes = _sums([cost.num_bytes for cost in costs])

    def is_small(start: int, stop: int) -> bool:
        return limit_bytes is None or sizes[stop] - sizes[start] <= limit_bytes

    slowest, cut = _least_worst(times, num_stages, is_small)
    if cut is None:
        least = _least_worst(sizes, num_stages, lambda start, stop: True)[0]
        raise ConfigError(
            f"no cut into {num_stages} stages keeps each within limit_bytes="
            f"{format_bytes(limit_bytes or 0)}: the largest stage has at least "
            f"{format_bytes(int(least))}; use more stages, or shard the parameters too"
        )

    def is_fast(start: int, stop: int) -> bool:
        return times[stop] - times[start] <= slowest and is_small(start, stop)

    _, cut = _least_worst(sizes, num_stages, is_fast)
    ends = [0, *(cut or ())]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(ends))


def _check(costs: Sequence[LayerCost], num_stages: int) -> None:
    if num_stages < 1:
        raise ConfigError(f"num_stages={num_stages}; a pipeline has at least 1 stage")
    if len(costs) < num_stages:
        raise ConfigError(
            f"{len(costs)} layer{'s' * (len(costs) != 1)} cannot be cut into {num_stages} stages; "
            f"use pipeline={len(costs)} or less, or divide the model into more modules"
        )
    for index, cost in enumerate(costs):
        if not (0 <= cost.seconds < math.inf and 0 <= cost.num_bytes < math.inf):
            raise ConfigError(f"layer {index} costs {cost}; give finite numbers of at least 0")


def _sums(values: Sequence[float]) -> list[float]:
    """Sums of the first 0, 1, 2... values; in whole units where they are whole."""
    found: list[float] = [0]
    for value in values:
        found.append(found[-1] + value)
    return found


def _least_worst(
    sums: Sequence[float], num_stages: int, fits: _Fits
) -> tuple[float, tuple[int, ...] | None]:
    """The smallest possible largest stage, and where its stages end; (inf, None): none fits."""
    num_layers = len(sums) - 1
    worst = [0.0, *([math.inf] * num_layers)]  # of the first layers, in the stages so far
    cuts: list[tuple[int, ...] | None] = [(), *([None] * num_layers)]
    for stage in range(num_stages):
        next_worst = [math.inf] * (num_layers + 1)
        next_cuts: list[tuple[int, ...] | None] = [None] * (num_layers + 1)
        for stop in range(stage + 1, num_layers - (num_stages - stage - 1) + 1):
            for start in range(stage, stop):
                before = cuts[start]
                if before is None or not fits(start, stop):
                    continue
                largest = max(worst[start], sums[stop] - sums[start])
                # Equal ones: the first start is the earliest cut.
                if next_cuts[stop] is None or largest < next_worst[stop]:
                    next_worst[stop], next_cuts[stop] = largest, (*before, stop)
        worst, cuts = next_worst, next_cuts
    return worst[-1], cuts[-1]
