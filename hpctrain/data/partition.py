"""Who has which samples: exact, disjoint, complete, balanced. Pure.

Every function answers for one part (a rank, usually) without looking at the others, for any number
of samples: 0, or fewer than parts, gives some parts nothing. Parts are ranges wherever they can be,
so that 10^12 samples cost no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import isfinite

import numpy as np
import numpy.typing as npt

from hpctrain.errors import ConfigError

__all__ = ["block", "cyclic", "quotas", "split", "stratified", "weighted"]


def block(num_samples: int, num_parts: int, part: int) -> range:
    """Neighbours stay together; sizes differ by at most one, the larger ones come first."""
    _check(num_samples, num_parts, part)
    size, larger = divmod(num_samples, num_parts)
    start = part * size + min(part, larger)
    return range(start, start + size + (part < larger))


def cyclic(num_samples: int, num_parts: int, part: int, *, start: int = 0) -> range:
    """Dealt like cards: position p belongs to part `p % num_parts`; sizes differ by at most one.

    Args:
        num_samples: Positions end here.
        num_parts: How many share them.
        part: Whose positions are asked for.
        start: Positions begin here; who has which does not depend on it.
    """
    _check(num_samples, num_parts, part)
    if not 0 <= start <= num_samples:
        raise ConfigError(f"start={start} must be from 0 to num_samples={num_samples}")
    return range(start + (part - start) % num_parts, num_samples, num_parts)


def weighted(num_samples: int, weights: Sequence[float], part: int) -> range:
    """Neighbours stay together; sizes are in proportion to the weights, as `quotas` has them."""
    _check(num_samples, len(weights), part)
    sizes = quotas(num_samples, weights)
    start = sum(sizes[:part])
    return range(start, start + sizes[part])


def quotas(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the weights, each rounded up or down, that sum exactly.

    What rounding down leaves goes to the largest fractions; equal ones in order. A part with a
    weight above 0 has at least one sample as long as there are enough for all.
    """
    finite = [weight for weight in weights if isfinite(weight) and weight >= 0]
    if num_samples < 0 or len(finite) < len(weights) or not any(finite):
        raise ConfigError(
            f"num_samples={num_samples} and weights={list(weights)} must not be negative, weights "
            "must be finite, and one weight must be above 0"
        )
    exact = [Fraction(weight) for weight in weights]
    shares = [num_samples * weight / sum(exact) for weight in exact]
    sizes = [int(share) for share in shares]
    by_fraction = sorted(range(len(sizes)), key=lambda i: (sizes[i] - shares[i], i))
    for i in by_fraction[: num_samples - sum(sizes)]:
        sizes[i] += 1
    wanting = [i for i, weight in enumerate(exact) if weight > 0 and sizes[i] == 0]
    for i in wanting:
        richest = max(range(len(sizes)), key=lambda j: (sizes[j], -j))
        if sizes[richest] > 1:
            sizes[richest] -= 1
            sizes[i] = 1
    return sizes


def stratified(labels: npt.ArrayLike, num_parts: int, part: int) -> npt.NDArray[np.int64]:
    """Every label dealt out evenly: its counts, and the sizes, differ by at most one.

    Args:
        labels: One per sample: whole numbers, strings, anything that numpy can sort.
        num_parts: How many share the samples.
        part: Whose samples are asked for.

    Returns:
        The part's samples in the order of the data.
    """
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ConfigError(f"labels have shape {array.shape}; give one label per sample")
    mine = cyclic(len(array), num_parts, part)
    by_label = np.argsort(array, kind="stable")
    return np.sort(by_label[mine.start : mine.stop : mine.step]).astype(np.int64, copy=False)


def split(num_samples: int, sizes: Mapping[str, float]) -> dict[str, range]:
    """Cut into named ranges that never overlap, such as train, validation and test.

    Args:
        num_samples: How many there are.
        sizes: By name, in order: counts (whole numbers; what they leave over belongs to nobody) or
            fractions (floats; if they sum to 1, every sample belongs to somebody).

    Returns:
        By name, positions from 0 on.
    """
    counts = all(isinstance(size, int) for size in sizes.values())
    total = sum(Fraction(size) if counts else _decimal(size) for size in sizes.values())
    room = num_samples if counts else 1
    if not sizes or min(sizes.values()) < 0 or total > room or (not counts and total == 0):
        raise ConfigError(
            f"sizes={dict(sizes)} do not fit into num_samples={num_samples}; give counts that sum "
            "to at most that, or fractions that sum to at most 1"
        )
    ends = [0]
    reached = Fraction(0)
    for size in sizes.values():
        reached += Fraction(size) if counts else _decimal(size) * num_samples
        ends.append(round(reached))
    return {name: range(*ends[i : i + 2]) for i, name in enumerate(sizes)}


def _decimal(number: float) -> Fraction:
    """What a person means by 0.1: a tenth, not the nearest double."""
    return Fraction(str(number))


def _check(num_samples: int, num_parts: int, part: int) -> None:
    if num_samples < 0 or num_parts < 1 or not 0 <= part < num_parts:
        raise ConfigError(
            f"part={part} of num_parts={num_parts} over num_samples={num_samples}: there must be "
            "at least one part, parts count from 0, and the number of samples is not negative"
        )
