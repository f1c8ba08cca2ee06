"""Laws of scaling, fitted to measured speed-ups. Pure.

Speed-up is throughput over that of one undistributed process, in weak and strong scaling.

| law | speed-up at n ranks, serial fraction s |
| --- | --- |
| ideal | n |
| Amdahl | 1 / (s + (1 - s) / n): a fixed part of a fixed work does not divide |
| Gustafson | s + (1 - s) n: work grows with n, and a part of each rank's time is lost |

Fits are least squares of the logarithms. Every law is 1 at one rank, as the baseline is by
definition: there is no free factor that would let a law have the right slope at the wrong height.
The interval of s comes from bootstrapped residuals, the order of the laws from AICc. The least bad
of three laws may still be wrong, so a law describes a curve only if it comes close to every point.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from hpctrain.bench.paired import paired_ratio
from hpctrain.bench.sweep import ALONE, NODE, RANKS, SweepPoint
from hpctrain.errors import ConfigError

__all__ = [
    "CLOSE_ENOUGH",
    "LAWS",
    "LIMIT",
    "KarpFlatt",
    "Law",
    "agrees",
    "choose_law",
    "conclude_curves",
    "curve_names",
    "fall_below",
    "find_baseline",
    "fit_laws",
    "is_alike",
    "is_kept",
    "judge_reach",
    "karp_flatt",
    "largest_miss",
    "make_ratios",
    "point_names",
    "serial_fraction",
    "trend",
]

_GRID = np.concatenate([[0.0], np.logspace(-6, -2, 201), np.linspace(0.011, 1.0, 990)])
_DRAWS = 400
_MATERIAL = 0.01  # serial fractions that differ by less are the same, however sure
_CONFIDENCE = 0.95
_ALIKE = 2.0  # laws whose AICc differs by less cannot be told apart
CLOSE_ENOUGH = 0.1
"""A law fits a curve if no measured speed-up differs from it by more than this."""
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
    """A 95 % interval of s; the whole possible range with fewer than four data points."""
    aicc: float | None
    """None where the data are too few for it."""
    error: float
    """RMS of the residuals of the logarithms: about the relative error."""

    def speedup(self, num_ranks: float) -> float:
        """What the law says."""
        return float(LAWS[self.name](np.asarray(float(num_ranks)), np.asarray(self.serial)))


def fit_laws(ranks: Sequence[int], speedups: Sequence[float], *, seed: int = 0) -> list[Law]:
    """Fit every law; the one that explains the data best comes first.

    Args:
        ranks: Of each datum, above 1: at 1 all laws are 1.
        speedups: Of each datum, above 0.
        seed: Of the bootstrap.

    Raises:
        ConfigError: the data are not of at least two numbers of ranks, or not above 0.
    """
    if len(ranks) != len(speedups) or len(set(ranks)) < 2 or min(ranks) <= 1:
        raise ConfigError("a law needs speed-ups at two or more numbers of ranks, all above 1")
    if min(speedups) <= 0 or not all(map(math.isfinite, speedups)):
        raise ConfigError("speed-ups must be above 0")
    n = np.asarray(ranks, dtype=float)
    y = np.log(np.asarray(speedups, dtype=float))
    found = [_fit(name, n, y, seed) for name in LAWS]
    # AICc where all have one; otherwise the smaller error, and the simpler law where equal.
    if any(law.aicc is None for law in found):
        return sorted(found, key=lambda law: law.error)
    return sorted(found, key=lambda law: law.aicc or 0.0)


def largest_miss(law: Law, curve: Mapping[int, float]) -> tuple[int, float]:
    """Where a law is furthest from measured speed-ups, and by how much relative to them."""
    misses = {n: abs(law.speedup(n) / speedup - 1) for n, speedup in curve.items()}
    worst = max(misses, key=lambda n: misses[n])
    return worst, misses[worst]


def choose_law(laws: Sequence[Law], curve: Mapping[int, float]) -> tuple[Law | None, bool]:
    """The best law that describes a curve, and whether it is clearly better than the next.

    Args:
        laws: Fitted ones, the best first.
        curve: The median speed-up at each number of ranks above 1.

    Returns:
        None where no law describes the curve.
    """
    right = [law for law in laws if largest_miss(law, curve)[1] <= CLOSE_ENOUGH]
    if not right:
        return None, False
    if len(right) == 1:
        return right[0], True
    best, following = (law.aicc for law in right[:2])
    return right[0], best is not None and following is not None and following - best >= _ALIKE


def _fit(name: str, n: Array, y: Array, seed: int) -> Law:
    free = name != "ideal"
    grid = _GRID if free else np.zeros(1)
    curves = np.log(LAWS[name](n[None, :], grid[:, None]))
    index = int(_closest(curves, y[None, :])[0])
    residuals = y - curves[index]
    count = len(y)
    low, high = (0.0, 1.0) if free else (0.0, 0.0)
    if free and count >= 4:
        draws = np.random.default_rng(seed).choice(residuals, (_DRAWS, count))
        draws *= math.sqrt(count / (count - 1))
        chosen = grid[_closest(curves, curves[index] + draws)]
        tails = (1 - _CONFIDENCE) / 2
        low, high = (float(q) for q in np.quantile(chosen, [tails, 1 - tails]))
    mean_square = float(np.mean(residuals**2))
    return Law(
        name=name,
        serial=float(grid[index]),
        low=min(low, float(grid[index])),
        high=max(high, float(grid[index])),
        aicc=_aicc(count, mean_square, 1 + free),
        error=math.sqrt(mean_square),
    )


def _closest(curves: Array, ys: Array) -> Any:
    """For each row of ys the curve with the least squares."""
    squares = (curves**2).sum(axis=1)[None, :] - 2 * ys @ curves.T
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


def serial_fraction(speedup: float, num_ranks: float) -> float:
    """Karp and Flatt's (1/S - 1/n) / (1 - 1/n), for n above 1; below 0 it is more than ideal."""
    return (1 / speedup - 1 / num_ranks) / (1 - 1 / num_ranks)


def karp_flatt(curve: Mapping[int, tuple[float, float, float]]) -> list[KarpFlatt]:
    """The serial fraction at every n above 1; rising, it is overhead that grows.

    Args:
        curve: Speed-up and the ends of its interval, by number of ranks.
    """
    return [
        KarpFlatt(
            num_ranks=n,
            fraction=serial_fraction(speedup, n),
            low=serial_fraction(high, n),
            high=serial_fraction(low, n),
        )
        for n, (speedup, low, high) in sorted(curve.items())
        if n > 1
    ]


def trend(series: Sequence[KarpFlatt], *, is_repeated: bool = True) -> str:
    """What a Karp-Flatt series does, beyond its intervals.

    Args:
        series: By number of ranks.
        is_repeated: Whether there are intervals at all.

    Returns:
        `negative` (more than ideal everywhere), `rises`, `falls`, `mixed` (up and down), `zero`
        (nothing to see), `level`, `unrepeated` (no intervals to judge by) or `unknown` (too short).
    """
    if len(series) < 2:
        return "unknown"
    if not is_repeated:
        return "unrepeated"
    if all(each.high < 0 for each in series):
        return "negative"
    pairs = list(itertools.combinations(series, 2))
    up = any(later.low > earlier.high + _MATERIAL for earlier, later in pairs)
    down = any(later.high < earlier.low - _MATERIAL for earlier, later in pairs)
    if up or down:
        return "mixed" if up and down else "rises" if up else "falls"
    return "zero" if all(abs(each.fraction) <= _MATERIAL for each in series) else "level"


def fall_below(law: Law, efficiency: float = 0.8, *, serial: float | None = None) -> float | None:
    """The number of ranks from which a law's efficiency is below a limit; None: never."""
    s = law.serial if serial is None else serial
    if law.name == "Amdahl" and s > 0:
        return (1 / efficiency - 1) / s + 1
    if law.name == "Gustafson" and s > 1 - efficiency:
        return s / (s - (1 - efficiency))
    return None


LIMIT = 0.8
"""The efficiency below which more ranks are a waste."""
_FEWEST_RANKS = 2
_AUTO = "auto"


def find_baseline(point: SweepPoint, good: Sequence[SweepPoint], role: str) -> SweepPoint | None:
    """The baseline with the same settings."""
    return next((p for p in good if p.role == role and is_alike(point.values, p.values)), None)


def is_alike(mine: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Whether two points have the same settings.

    One process with all cores uses a fused optimizer unless that is varied: it counts
    only where both have it.
    """
    ignored = set() if "fused" in mine and "fused" in theirs else {"fused"}
    return all(mine.get(k) == theirs.get(k) for k in {*mine, *theirs} - ignored)


def make_ratios(
    case: str, good: Sequence[SweepPoint], seconds: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    """Times over those of the baseline, and of each setting over the first one of its axis."""
    ratios = []
    for point in good:
        rivals = [find_baseline(point, good, ALONE) or find_baseline(point, good, NODE)]
        rivals += [_hand_set(point, key, good) for key in point.values if key != "fused"]
        for rival in rivals:
            if rival is not None and rival is not point:
                pair = {"case": case, "variant": point.name, "baseline": rival.name}
                ratio = paired_ratio(seconds[point.name], seconds[rival.name])
                ratios.append({**pair, **asdict(ratio)})
    return ratios


def _hand_set(point: SweepPoint, key: str, good: Sequence[SweepPoint]) -> SweepPoint | None:
    """The same point with the first value of one axis."""
    first = next(p.values[key] for p in good if key in p.values)
    wanted = {**point.values, key: first}
    place = (point.role, point.engine, point.num_ranks, point.num_threads)
    for other in good:
        there = (other.role, other.engine, other.num_ranks, other.num_threads)
        if there == place and dict(other.values) == wanted:
            return other
    return None


def curve_names(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the curve of each point is called, by the point's name.

    A sweep over `auto` leaves the engine to the script: once it ran, the engine is known and told.
    """
    told = _told_engines(rows)
    return {row["name"]: _tell(_kind(row), told.get(_kind(row))) for row in rows}


def point_names(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What each point is shown as, by its name."""
    told = _told_engines(rows)
    return {row["name"]: _tell(row["name"], told.get(_kind(row))) for row in rows}


def _told_engines(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The engines that `auto` turned out to be, by curve; one rank needs none, so others count."""
    used: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: -row["num_ranks"]):
        if row.get("engine") == _AUTO and row.get("engine_used"):
            known = used.setdefault(_kind(row), [])
            if row["engine_used"] not in known and (row["num_ranks"] > 1 or not known):
                known.append(row["engine_used"])
    return {kind: ", ".join(engines) for kind, engines in used.items()}


def _tell(name: str, engine: str | None) -> str:
    return name if engine is None else f"{_AUTO} ({engine}){name.removeprefix(_AUTO)}"


def _kind(row: Mapping[str, Any]) -> str:
    return str(row.get("kind") or row.get("engine") or row["name"])


def conclude_curves(
    rows: Sequence[Mapping[str, Any]], seconds: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """What follows from the points of every curve: the only place where it is computed.

    Everything is taken from the rows that tables show, so that no sentence can have other figures
    than they; results that older versions wrote are concluded from again.

    Args:
        rows: The points of a sweep.
        seconds: Times of every launch, by the point's name; paired with those of the baseline.
    """
    names = curve_names(rows)
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("role", RANKS) == RANKS and row.get("speedup"):
            curves.setdefault(names[row["name"]], []).append(row)
    return [_conclude(kind, curve, rows, seconds) for kind, curve in curves.items()]


def _conclude(
    kind: str,
    curve: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """One curve.

    Fewer than two numbers of ranks above 1, or one launch of each, are met by laws that say
    opposite things: none is fitted then.
    """
    several = [row for row in curve if row["num_ranks"] > 1]
    is_repeated = any("speedup_low" in row for row in several)
    series = karp_flatt({row["num_ranks"]: _speedup(row) for row in several})
    reach = judge_reach({row["num_ranks"]: row["efficiency"] for row in curve})
    found: dict[str, Any] = {
        "kind": kind,
        **reach,
        "best": None,
        "is_clear": False,
        "fits": [],
        "karp_flatt": [asdict(each) for each in series],
        "trend": trend(series, is_repeated=is_repeated),
        "falls_below": None,
        "falls_below_low": None,
        "falls_below_high": None,
        "never_falls": False,
    }
    if len({row["num_ranks"] for row in several}) < _FEWEST_RANKS or not is_repeated:
        return found
    data = [(r["num_ranks"], s) for r in several for s in _launches(r, rows, seconds)]
    laws = fit_laws([n for n, _ in data], [s for _, s in data])
    medians = {row["num_ranks"]: row["speedup"] for row in several}
    found["fits"] = [_fit_row(law, medians) for law in laws]
    best, found["is_clear"] = choose_law(laws, medians)
    if best is not None:
        found["best"] = best.name
        where = fall_below(best, LIMIT)
        found["never_falls"] = where is None and not reach["missed_at"]
        if where is not None and agrees(where, reach):
            found |= {
                "falls_below": where,
                "falls_below_low": fall_below(best, LIMIT, serial=best.high),
                "falls_below_high": fall_below(best, LIMIT, serial=best.low),
            }
    return found


def _fit_row(law: Law, medians: Mapping[int, float]) -> dict[str, Any]:
    ranks, miss = largest_miss(law, medians)
    return {**asdict(law), "largest_miss": miss, "largest_miss_at": ranks}


def judge_reach(efficiencies: Mapping[int, float]) -> dict[str, Any]:
    """At which numbers of ranks efficiency is at the limit or above, and at which below."""
    ordered = sorted(efficiencies.items())
    return {
        "efficiency_limit": LIMIT,
        "kept_at": [n for n, value in ordered if is_kept(value)],
        "missed_at": [[n, value] for n, value in ordered if not is_kept(value)],
    }


def is_kept(efficiency: float) -> bool:
    """Whether an efficiency, as precisely as tables show it, is at the limit or above."""
    return round(100 * efficiency, 1) >= round(100 * LIMIT, 1)


def agrees(where: float, reach: Mapping[str, Any]) -> bool:
    """Whether no measured point contradicts a claim of where efficiency falls below the limit."""
    return all(n <= where for n in reach["kept_at"]) and all(
        n >= where for n, _ in reach["missed_at"]
    )


def _speedup(row: Mapping[str, Any]) -> tuple[float, float, float]:
    middle = float(row["speedup"])
    return middle, float(row.get("speedup_low", middle)), float(row.get("speedup_high", middle))


def _launches(
    row: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, Sequence[float]],
) -> list[float]:
    """The speed-up of every launch, whose median is the row's; else that and its interval."""
    own = row.get("values", {})
    alone: Mapping[str, Any] = next(
        (r for r in rows if r.get("role") == ALONE and is_alike(own, r.get("values", {}))), {}
    )
    mine, base = (seconds.get(each.get("name", ""), ()) for each in (row, alone))
    if not mine or len(mine) != len(base):
        return list(_speedup(row))
    ratios = [b / m for m, b in zip(mine, base, strict=True)]
    return [float(row["speedup"]) * ratio / median(ratios) for ratio in ratios]
