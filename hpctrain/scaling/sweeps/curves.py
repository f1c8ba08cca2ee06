"""How the points of a sweep stand to each other: baselines, ratios, curves and their laws. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from hpctrain.scaling.harness.ratios import paired_ratio
from hpctrain.scaling.sweeps.laws import best_law, fall_below, fit_laws, karp_flatt, trend
from hpctrain.scaling.sweeps.points import ALONE, NODE, RANKS, Point

__all__ = ["find_baseline", "fit_curves", "make_ratios"]

_LIMIT = 0.8
_FEWEST_RANKS = 3
_FEWEST_DATA = 4


def find_baseline(point: Point, good: Sequence[Point], role: str) -> Point | None:
    """The baseline with the same settings."""
    own = {k: v for k, v in point.values.items() if k != "fused"}
    for other in good:
        values = {k: v for k, v in other.values.items() if k != "fused"}
        if other.role == role and values == own:
            return other
    return None


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


def fit_curves(good: Sequence[Point], rates: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """The laws of every curve, from the work a second of every launch."""
    return [law for kind in _kinds(good) for law in _laws(kind, good, rates)]


def _kinds(good: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.kind for point in good if point.role == RANKS))


def _laws(
    kind: str, good: Sequence[Point], rates: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    """The laws of one curve; nothing where it has fewer than two numbers of ranks.

    Two numbers of ranks, or fewer than four launches, are met by laws that say opposite things:
    none is fitted, and `best` is None.
    """
    curve = [point for point in good if point.role == RANKS and point.kind == kind]
    alone = find_baseline(curve[0], good, ALONE)
    if alone is None:
        return []
    ranks, speedups = [], []
    for point in (alone, *(p for p in curve if p.num_ranks > 1)):
        for mine, base in zip(rates[point.name], rates[alone.name], strict=True):
            ranks.append(point.num_ranks)
            speedups.append(mine / base if point is not alone else mine / median(rates[alone.name]))
    if len(set(ranks)) < 2:
        return []
    series = karp_flatt(ranks, speedups)
    found: dict[str, Any] = {
        "kind": kind,
        "best": None,
        "is_clear": False,
        "fits": [],
        "karp_flatt": [asdict(each) for each in series],
        "trend": trend(series) if len(rates[alone.name]) > 1 else "unrepeated",
        "efficiency_limit": _LIMIT,
        "falls_below": None,
        "falls_below_low": None,
        "falls_below_high": None,
        "num_data": len(ranks),
    }
    if len(set(ranks)) >= _FEWEST_RANKS and len(ranks) >= _FEWEST_DATA:
        laws = fit_laws(ranks, speedups)
        best, clearly = best_law(laws)
        found |= {
            "best": best.name,
            "is_clear": clearly,
            "fits": [asdict(law) for law in laws],
            "falls_below": fall_below(best, _LIMIT),
            "falls_below_low": fall_below(best, _LIMIT, serial=best.high),
            "falls_below_high": fall_below(best, _LIMIT, serial=best.low),
        }
    return [found]
