"""How the points of a sweep stand to each other: baselines, ratios, curves and their laws. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from hpctrain.bench.laws import (
    Law,
    choose_law,
    fall_below,
    fit_laws,
    karp_flatt,
    largest_miss,
    trend,
)
from hpctrain.bench.points import ALONE, NODE, RANKS, Point
from hpctrain.bench.ratios import paired_ratio

__all__ = [
    "LIMIT",
    "agrees",
    "conclude_curves",
    "curve_names",
    "find_baseline",
    "is_alike",
    "is_kept",
    "judge_reach",
    "make_ratios",
    "point_names",
]

LIMIT = 0.8
"""The efficiency below which more ranks are called a waste."""
_FEWEST_RANKS = 2
_AUTO = "auto"


def find_baseline(point: Point, good: Sequence[Point], role: str) -> Point | None:
    """The baseline with the same settings."""
    return next((p for p in good if p.role == role and is_alike(point.values, p.values)), None)


def is_alike(mine: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Whether two points have the same settings.

    One process with all cores is asked for a fused optimizer where nobody varies that: it counts
    only where both have it.
    """
    ignored = set() if "fused" in mine and "fused" in theirs else {"fused"}
    return all(mine.get(k) == theirs.get(k) for k in {*mine, *theirs} - ignored)


def make_ratios(
    case: str, good: Sequence[Point], seconds: Mapping[str, list[float]]
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


def _hand_set(point: Point, key: str, good: Sequence[Point]) -> Point | None:
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
    than they; results that older versions wrote are concluded from anew.

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
