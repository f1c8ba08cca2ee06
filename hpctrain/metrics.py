"""Metrics over all ranks that are exact: the same digits on every number of ranks.

Whole numbers are added as such. Floating-point sums are kept without rounding, as a few parts that
do not overlap, and rounded once at the end: no order of adding, and so no number of ranks, changes
a bit.

    loss = metrics.Mean()
    right = metrics.Confusion(num_classes=10)
    for x, y in loader:
        out = model(x)
        loss.update(cross_entropy(out, y, reduction="none"))
        right.update(out.argmax(1), y)
    print(loss.value(world), right.value(world).accuracy)

On a grid (`loss.value(grid)`) the ranks of one data coordinate have the same samples: the first of
its last stage counts for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hpctrain.errors import ConfigError
from hpctrain.world import World, agree, roll_call

if TYPE_CHECKING:
    from hpctrain.grid import Grid

__all__ = ["Confusion", "ConfusionMatrix", "Mean", "Sum", "total"]

T = TypeVar("T")


def total(over: World | Grid, value: Any) -> Any:
    """Collective: the exact sum over all ranks of a number, or of an array of numbers.

    Args:
        over: The ranks; of a grid, one for each data coordinate counts.
        value: A whole or floating-point number, or an array or tensor of whole numbers whose shape
            is the same on all ranks.

    Returns:
        An int, a float or an array of int64, the same on all ranks.

    Raises:
        ConfigError: on all ranks, when shapes or kinds differ, or an int64 would overflow.
    """
    number, trouble = _plain(value)
    agree(_world(over).comm, trouble, error=ConfigError)
    told: list[Any] = _gather(over, number)
    kinds = {(type(one), getattr(one, "shape", None)) for one in told}
    if len(kinds) > 1:
        raise ConfigError(
            f"metrics.total: the ranks passed different kinds: {sorted(map(str, kinds))}"
        )
    if isinstance(told[0], float):
        return _rounded(told)
    if isinstance(told[0], int):
        return sum(told)
    exact = np.sum([one.astype(object) for one in told], axis=0)
    if exact.size and max(abs(int(exact.max())), abs(int(exact.min()))) >= 2**63:
        raise ConfigError("metrics.total: a sum does not fit into 64 bits; give smaller numbers")
    return np.asarray(exact, dtype=np.int64)


class Sum:
    """A sum of floating-point numbers that is rounded once, when it is read."""

    def __init__(self) -> None:
        self._parts: list[float] = []
        self.count = 0
        """How many numbers were added."""

    def update(self, values: Any) -> None:
        """Add one number, or all numbers of an array or tensor."""
        numbers = _numbers(values)
        self.count += len(numbers)
        self._parts = _merge([*self._parts, *numbers])

    def value(self, over: World | Grid) -> float:
        """Collective: the sum over all ranks, or over a grid's data coordinates."""
        parts, _ = self._all(over)
        return _rounded(parts)

    def _all(self, over: World | Grid) -> tuple[list[float], int]:
        roll_call(_world(over).comm, "metrics")
        told = _gather(over, (self._parts, self.count))
        return [part for parts, _ in told for part in parts], sum(count for _, count in told)


class Mean(Sum):
    """A mean over samples, not over batches: every sample weighs the same on every rank."""

    def update(self, values: Any, num_samples: int | None = None) -> None:
        """Add values of samples.

        Args:
            values: One value per sample; or, with `num_samples`, the mean over that many samples.
            num_samples: How many samples the mean is of.
        """
        if num_samples is None:
            super().update(values)
            return
        numbers = _numbers(values)
        if len(numbers) != 1 or num_samples < 0:
            raise ConfigError(
                f"Mean.update: {len(numbers)} values with num_samples={num_samples}; give one mean "
                "and how many samples it is of, or the values alone"
            )
        if num_samples:  # the mean of nothing is not a number
            self._parts = _merge([*self._parts, *_times(numbers[0], num_samples)])
            self.count += num_samples

    def value(self, over: World | Grid) -> float:
        """Collective: the mean over the samples of all ranks, or of a grid's data coordinates.

        Raises:
            ConfigError: on all ranks, when there were no samples.
        """
        parts, count = self._all(over)
        if count == 0:
            raise ConfigError("Mean.value: no rank has added a sample, so there is no mean")
        if not all(map(math.isfinite, parts)):
            return _rounded(parts)
        return float(sum(map(Fraction, parts), Fraction()) / count)


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """How often a class (row) was taken for another (column), over all ranks."""

    counts: np.ndarray

    @property
    def num_samples(self) -> int:
        """How many samples were judged."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """The share of samples that were judged right; NaN without samples."""
        return (
            float(Fraction(int(np.trace(self.counts)), n)) if (n := self.num_samples) else math.nan
        )

    @property
    def recall(self) -> np.ndarray:
        """By class: the share of its samples that were found; NaN where it has none."""
        return _divide(np.diag(self.counts), self.counts.sum(axis=1))

    @property
    def precision(self) -> np.ndarray:
        """By class: the share of those taken for it that are of it; NaN where there are none."""
        return _divide(np.diag(self.counts), self.counts.sum(axis=0))


class Confusion:
    """Counts by true and predicted class.

    Args:
        num_classes: How many classes there are, numbered from 0.
    """

    def __init__(self, num_classes: int) -> None:
        if num_classes < 1:
            raise ConfigError(f"num_classes={num_classes} must be at least 1")
        self.counts = np.zeros((num_classes, num_classes), np.int64)

    def update(self, predicted: Any, wanted: Any) -> None:
        """Count samples: what they were taken for, and what they are."""
        taken, true = _classes(predicted, "predicted"), _classes(wanted, "wanted")
        size = len(self.counts)
        if len(taken) != len(true):
            raise ConfigError(f"{len(taken)} predicted classes for {len(true)} true ones")
        for name, given in (("predicted", taken), ("wanted", true)):
            if len(given) and not 0 <= given.min() <= given.max() < size:
                raise ConfigError(
                    f"{name} classes from {given.min()} to {given.max()} are not all from 0 to "
                    f"{size - 1} (num_classes={size})"
                )
        self.counts += np.bincount(true * size + taken, minlength=size * size).reshape(size, size)

    def value(self, over: World | Grid) -> ConfusionMatrix:
        """Collective: the counts of all ranks; the number of classes must match."""
        return ConfusionMatrix(total(over, self.counts))


def _world(over: World | Grid) -> World:
    return over if isinstance(over, World) else over.world


def _gather(over: World | Grid, value: T) -> list[T]:
    """Collective: the value of every rank that counts."""
    told: list[T] = _world(over).comm.allgather(value)
    return told if isinstance(over, World) else [told[rank] for rank in over.speakers]


def _merge(numbers: list[float]) -> list[float]:
    """A few parts whose exact sum is that of these numbers."""
    finite = [number for number in numbers if math.isfinite(number)]
    odd = [number for number in numbers if not math.isfinite(number)]
    parts: list[float] = [sum(odd)] if odd else []
    while rest := math.fsum(finite):  # rounded once; what that lost is in the next round
        parts.append(rest)
        finite.append(-rest)
    return parts


def _rounded(parts: list[float]) -> float:
    """The sum, rounded once; infinities and NaN as addition has them."""
    if all(map(math.isfinite, parts)):
        return math.fsum(parts)
    return sum(part for part in parts if not math.isfinite(part))


def _times(mean: float, count: int) -> list[float]:
    """Parts whose exact sum is `mean * count`."""
    if not math.isfinite(mean):
        return [mean * count]
    left = Fraction(mean) * count
    parts: list[float] = []
    while left:
        part = float(left)
        parts.append(part)
        left -= Fraction(part)
    return parts


def _plain(value: Any) -> tuple[int | float | np.ndarray, str | None]:
    """A number or an array that can be added exactly, or why it cannot."""
    given = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if given.dtype.kind not in "iufb":
        return 0, f"metrics.total: {given.dtype} cannot be added; give numbers"
    if given.ndim == 0:
        number = given.item()
        return (float(number) if given.dtype.kind == "f" else int(number)), None
    if given.dtype.kind == "f":
        return 0, (
            "metrics.total: an array of floating-point numbers; add whole numbers, or one number "
            "at a time (metrics.Sum)"
        )
    return given, None


def _numbers(values: Any) -> list[float]:
    given = np.asarray(values.detach().cpu().double() if hasattr(values, "detach") else values)
    if given.dtype.kind not in "iufb":
        raise ConfigError(f"metrics: {given.dtype} cannot be added; give numbers")
    numbers: list[float] = given.astype(np.float64).reshape(-1).tolist()
    return numbers


def _classes(values: Any, name: str) -> np.ndarray:
    given = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if given.size and given.dtype.kind not in "iub":
        raise ConfigError(f"{name} classes must be whole numbers, not {given.dtype}")
    return given.reshape(-1).astype(np.int64)


def _divide(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    shares = np.full(len(whole), np.nan)
    np.divide(part, whole, out=shares, where=whole > 0)
    return shares
