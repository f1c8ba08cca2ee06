"""Paired measuring: shuffled blocks, which of them count, medians of ratios. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

from hpctrain.errors import ConfigError

__all__ = [
    "Kept",
    "Ratio",
    "choose_blocks",
    "interval_ranks",
    "more_are_needed",
    "paired_ratio",
    "shuffled_order",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """How a variant compares with its baseline."""

    median: float
    low: float
    high: float
    coverage: float
    """The probability that an interval made like this one contains the true median."""
    num_blocks: int


def interval_ranks(count: int, confidence: float) -> tuple[int, int, float]:
    """Which order statistics bound the median of `count` samples.

    Whatever the distribution, the number of samples below its median is binomial, so no model of
    the noise is needed, and no random numbers.

    Args:
        count: How many independent samples, at least 1.
        confidence: The required coverage, such as 0.95.

    Returns:
        First and last position in the sorted samples, from 0, and the exact coverage. Too few
        samples for the required coverage give the whole range, and what that covers.
    """
    if count < 1:
        raise ConfigError(f"count={count}: an interval needs at least 1 sample")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence} must be above 0 and below 1")
    first, outside = 0, 1
    while True:
        more = outside + comb(count, first + 1)
        if first + 1 > count - 2 - first or 1 - 2 * more / 2**count < confidence:
            return first, count - 1 - first, max(0.0, 1 - 2 * outside / 2**count)
        first, outside = first + 1, more


def paired_ratio(
    variant: Sequence[float], baseline: Sequence[float], *, confidence: float = 0.95
) -> Ratio:
    """Compare times that were taken in the same blocks, block by block.

    Dividing inside a block cancels whatever made the whole block slow.

    Raises:
        ConfigError: there are no samples, not equally many, or times that are not above 0.
    """
    if not variant or len(variant) != len(baseline):
        raise ConfigError(
            f"{len(variant)} and {len(baseline)} samples cannot be paired; give equally many, and "
            "at least 1"
        )
    if min(*variant, *baseline) <= 0:
        raise ConfigError("a time of 0 or less cannot be divided; measure more repeats")
    ordered = sorted(mine / theirs for mine, theirs in zip(variant, baseline, strict=True))
    first, last, coverage = interval_ranks(len(ordered), confidence)
    return Ratio(
        median=median(ordered),
        low=ordered[first],
        high=ordered[last],
        coverage=coverage,
        num_blocks=len(ordered),
    )


def shuffled_order(variants: Sequence[str], *, seed: int, case: str, block: int) -> list[str]:
    """The order of the variants in a block: random, and reproducible.

    No variant is always first or always after a certain other one, so what the previous one leaves
    behind (caches, clock rates) does not fall on the same variant each time.
    """
    order = list(variants)
    random.Random(f"{seed}/{case}/{block}").shuffle(order)
    return order


def more_are_needed(loads: Sequence[float], *, wanted: int, retries: int, limit: float) -> bool:
    """Whether to measure another block after those that had these background loads."""
    quiet = sum(load <= limit for load in loads)
    return quiet < wanted and len(loads) < wanted + retries


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Blocks that count."""

    indices: tuple[int, ...]
    num_noisy: int
    """How many were measured under too much background load because too few were quiet."""


def choose_blocks(loads: Sequence[float], *, wanted: int, limit: float) -> Kept:
    """Choose the quiet blocks, and where they are too few, the least disturbed of the others.

    The choice depends only on the load, never on the times: leaving out slow blocks because they
    are slow would be cheating.
    """
    if wanted < 1 or len(loads) < wanted:
        raise ConfigError(f"{len(loads)} blocks were measured, {wanted} are required")
    quiet = [index for index in range(len(loads)) if loads[index] <= limit][:wanted]
    noisy = sorted(set(range(len(loads))) - set(quiet), key=lambda index: loads[index])
    filled = noisy[: wanted - len(quiet)]
    return Kept(indices=tuple(sorted([*quiet, *filled])), num_noisy=len(filled))
