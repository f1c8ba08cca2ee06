"""Two results side by side: what is slower beyond noise, and what counts differently. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hpctrain.bench.paired import interval_ranks
from hpctrain.errors import ConfigError

__all__ = [
    "COUNTS_SCHEMA",
    "Compared",
    "Counted",
    "compare_counts",
    "compare_times",
    "counts_of",
    "read_counts",
]

COUNTS_SCHEMA = "hpctrain.counts/1"
_CONFIDENCE = 0.95
Key = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One point in both results."""

    case: str
    variant: str
    ratio: float
    """New over old time."""
    low: float
    high: float
    verdict: str
    """`slower`, `faster`, `same`; `missing` where one of the results has not measured it, and
    `unrepeated` where one has measured it once, so that there is no interval and no verdict."""


def compare_times(
    old: Mapping[str, Any], new: Mapping[str, Any], *, tolerance: float = 0.03
) -> list[Compared]:
    """Every point of either result; slower is what is so beyond noise and tolerance.

    The interval of the ratio is that of two medians, each within its own: beyond noise means that
    these do not overlap. Results of different days are not paired, so nothing finer is honest.

    Raises:
        ConfigError: the results are of different benchmarks or machines.
    """
    if old["benchmark"] != new["benchmark"]:
        raise ConfigError(f"{old['benchmark']} and {new['benchmark']} cannot be compared")
    if any(old["machine"][what] != new["machine"][what] for what in ("id", "cpu")):
        raise ConfigError(
            f"times on {old['machine']['cpu']} ({old['machine']['id']}) and "
            f"{new['machine']['cpu']} ({new['machine']['id']}) cannot be compared; use results "
            "from one kind of machine, or --counts"
        )
    before, after = _times(old), _times(new)
    rows = []
    for key in [*before, *(key for key in after if key not in before)]:
        if key not in before or key not in after:
            rows.append(_missing(key))
            continue
        a, b = _median(before[key]), _median(after[key])
        ratio, low, high = b[0] / a[0], b[1] / a[2], b[2] / a[1]
        verdict = "same"
        if min(len(before[key]), len(after[key])) < 2:
            verdict = "unrepeated"
        elif low > 1 and ratio > 1 + tolerance:
            verdict = "slower"
        elif high < 1 and ratio < 1 - tolerance:
            verdict = "faster"
        rows.append(
            Compared(case=key[0], variant=key[1], ratio=ratio, low=low, high=high, verdict=verdict)
        )
    return rows


def _missing(key: Key) -> Compared:
    return Compared(case=key[0], variant=key[1], ratio=1.0, low=1.0, high=1.0, verdict="missing")


def _times(result: Mapping[str, Any]) -> dict[Key, Sequence[float]]:
    return {(item["case"], item["variant"]): item["seconds"] for item in result["series"]}


def _median(seconds: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(seconds)
    first, last, _ = interval_ranks(len(ordered), _CONFIDENCE)
    return median(ordered), ordered[first], ordered[last]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """One count of one point in both."""

    case: str
    variant: str
    name: str
    old: float | None
    new: float | None
    verdict: str
    """`more` (a regression), `less`, `same`, or `missing`."""


def counts_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of results, as kept in the repository; no times and no machine."""
    rows = [
        {"case": item["case"], "variant": item["variant"], "counts": dict(item["counts"])}
        for result in results
        for item in result["series"]
        if item["counts"]
    ]
    return {"schema": COUNTS_SCHEMA, "series": rows}


def read_counts(table: Mapping[str, Any]) -> dict[Key, Mapping[str, float]]:
    """By case and variant, from kept counts or from a result.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return {
            (item["case"], item["variant"]): item["counts"]
            for item in table["series"]
            if item["counts"]
        }
    except (KeyError, TypeError) as error:
        raise ConfigError(f"neither a result nor a table of counts ({error})") from error


def compare_counts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Counted]:
    """Every count of either; they are exact, so any that grew is a regression."""
    before, after = read_counts(old), read_counts(new)
    rows = []
    for key in [*before, *(key for key in after if key not in before)]:
        mine, theirs = before.get(key, {}), after.get(key, {})
        for name in dict.fromkeys([*mine, *theirs]):
            a, b = mine.get(name), theirs.get(name)
            verdict = "missing"
            if a is not None and b is not None:
                verdict = "same" if a == b else "more" if b > a else "less"
            rows.append(
                Counted(case=key[0], variant=key[1], name=name, old=a, new=b, verdict=verdict)
            )
    return rows
