"""Laws of scaling, fitted to measured speed-ups. Pure.

Speed-up is throughput over that of one undistributed process, in weak and strong scaling alike.

| law | speed-up at n ranks, serial fraction s |
| --- | --- |
| ideal | n |
| Amdahl | 1 / (s + (1 - s) / n): a fixed part of a fixed work does not divide |
| Gustafson | s + (1 - s) n: work grows with n, and a part of each rank's time is lost |

Fits are least squares of the logarithms with a free factor, for the baseline is measured too; the
interval of s comes from bootstrapped residuals. Which law explains the data is decided by AICc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from hpctrain.errors import ConfigError
from hpctrain.scaling.harness.ratios import interval_ranks

__all__ = ["LAWS", "KarpFlatt", "Law", "best_law", "fall_below", "fit_laws", "karp_flatt", "trend"]

_GRID = np.concatenate([[0.0], np.logspace(-6, -2, 201), np.linspace(0.011, 1.0, 990)])
_DRAWS = 400
_MATERIAL = 0.01  # serial fractions that differ by less are the same, however sure
_CONFIDENCE = 0.95
_CLOSE = 2.0  # laws whose AICc differs by less cannot be told apart
Array = np.ndarray[Any, np.dtype[np.float64]]

LAWS: dict[str, Callable[[Array, Array], Array]] = {
    "ideal": lambda n, s: n + 0 * s,
    "Amdahl": lambda n, s: 1 / (s + (1 - s) / n),
    "Gustafson": lambda n, s: s + (1 - s) * n,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """A law that was fitted."""

    name: str
    serial: float
    """The serial fraction s; 0 of the ideal law."""
    low: float
    high: float
    """A 95 % interval of s; with fewer than four data the whole range that is possible."""
    factor: float
    """What the fitted curve is at one rank; 1 but for the noise of the baseline."""
    aicc: float | None
    """None where the data are too few for it."""
    error: float
    """Root of the mean square of the logarithms' residuals: about the relative error."""

    def speedup(self, num_ranks: float) -> float:
        """What the law says."""
        return float(LAWS[self.name](np.asarray(float(num_ranks)), np.asarray(self.serial)))


def fit_laws(ranks: Sequence[int], speedups: Sequence[float], *, seed: int = 0) -> list[Law]:
    """Fit every law; the one that explains the data best comes first.

    Args:
        ranks: Of each datum; those of the baseline are 1.
        speedups: Of each datum, above 0.
        seed: Of the bootstrap.

    Raises:
        ConfigError: the data are not of at least two numbers of ranks, or not above 0.
    """
    if len(ranks) != len(speedups) or len(set(ranks)) < 2 or min(ranks) < 1:
        raise ConfigError("a law needs speed-ups at two numbers of ranks or more")
    if min(speedups) <= 0 or not all(map(math.isfinite, speedups)):
        raise ConfigError("speed-ups must be above 0")
    n = np.asarray(ranks, dtype=float)
    y = np.log(np.asarray(speedups, dtype=float))
    found = [_fit(name, n, y, seed) for name in LAWS]
    # AICc where there is one; otherwise the smaller error, and the simpler law where equal.
    return sorted(found, key=lambda law: law.aicc if law.aicc is not None else law.error)


def best_law(laws: Sequence[Law]) -> tuple[Law, bool]:
    """The best of fitted laws, and whether it is clearly better than the next."""
    best = laws[0]
    if len(laws) < 2 or best.aicc is None or laws[1].aicc is None:
        return best, False
    return best, laws[1].aicc - best.aicc >= _CLOSE


def _fit(name: str, n: Array, y: Array, seed: int) -> Law:
    free = name != "ideal"
    grid = _GRID if free else np.zeros(1)
    curves = np.log(LAWS[name](n[None, :], grid[:, None]))
    centred = curves - curves.mean(axis=1, keepdims=True)
    index = int(_closest(centred, y[None, :])[0])
    factor = float(y.mean() - curves[index].mean())
    residuals = y - curves[index] - factor
    count, num_free = len(y), 1 + free
    low, high = (0.0, 1.0) if free else (0.0, 0.0)
    if free and count >= 4:
        draws = np.random.default_rng(seed).choice(residuals, (_DRAWS, count))
        draws *= math.sqrt(count / max(1, count - num_free))
        chosen = grid[_closest(centred, curves[index] + draws)]
        tails = (1 - _CONFIDENCE) / 2
        low, high = (float(q) for q in np.quantile(chosen, [tails, 1 - tails]))
    mean_square = float(np.mean(residuals**2))
    return Law(
        name=name,
        serial=float(grid[index]),
        low=min(low, float(grid[index])),
        high=max(high, float(grid[index])),
        factor=math.exp(factor),
        aicc=_aicc(count, mean_square, num_free + 1),
        error=math.sqrt(mean_square),
    )


def _closest(centred: Array, ys: Array) -> Any:
    """For each row of ys the curve with the least squares, whatever the common factor."""
    y = ys - ys.mean(axis=1, keepdims=True)
    squares = (centred**2).sum(axis=1)[None, :] - 2 * y @ centred.T
    return squares.argmin(axis=1)


def _aicc(count: int, mean_square: float, num_parameters: int) -> float | None:
    if count - num_parameters - 1 <= 0:
        return None
    correction = 2 * num_parameters * (num_parameters + 1) / (count - num_parameters - 1)
    # Clocks are not better than this: a perfect fit must not win by infinity.
    return count * math.log(max(mean_square, 1e-10)) + 2 * num_parameters + correction


@dataclass(frozen=True, kw_only=True, slots=True)
class KarpFlatt:
    """The experimentally determined serial fraction at one number of ranks."""

    num_ranks: int
    fraction: float
    low: float
    high: float


def karp_flatt(ranks: Sequence[int], speedups: Sequence[float]) -> list[KarpFlatt]:
    """The series of (1/S - 1/n) / (1 - 1/n) for n above 1; rising, it is overhead that grows."""
    by_ranks: dict[int, list[float]] = {}
    for n, speedup in zip(ranks, speedups, strict=True):
        if n > 1:
            by_ranks.setdefault(n, []).append((1 / speedup - 1 / n) / (1 - 1 / n))
    series = []
    for n, fractions in sorted(by_ranks.items()):
        ordered = sorted(fractions)
        first, last, _ = interval_ranks(len(ordered), _CONFIDENCE)
        series.append(
            KarpFlatt(num_ranks=n, fraction=median(ordered), low=ordered[first], high=ordered[last])
        )
    return series


def trend(series: Sequence[KarpFlatt]) -> str:
    """Whether a Karp-Flatt series rises, falls, or is level within its intervals."""
    if len(series) < 2:
        return "unknown"
    first, last = series[0], series[-1]
    if last.low > first.high + _MATERIAL:
        return "rises"
    return "falls" if last.high < first.low - _MATERIAL else "level"


def fall_below(law: Law, efficiency: float = 0.8, *, serial: float | None = None) -> float | None:
    """The number of ranks from which a law's efficiency is below a limit; None: never."""
    s = law.serial if serial is None else serial
    if law.name == "Amdahl" and s > 0:
        return (1 / efficiency - 1) / s + 1
    if law.name == "Gustafson" and s > 1 - efficiency:
        return s / (s - (1 - efficiency))
    return None
