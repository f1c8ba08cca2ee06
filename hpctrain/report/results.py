"""Benchmark results as reports see them: studies of scaling, collectives, and all the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain.bench.curves import curve_names
from hpctrain.bench.ratios import interval_ranks
from hpctrain.bench.schema import upgrade, validate
from hpctrain.bench.table import conclude_result, describe_law, describe_settings
from hpctrain.errors import ConfigError
from hpctrain.report.points import PARTS, Estimate, Point, Study

__all__ = ["Bandwidth", "Result", "doubts_of", "estimate", "read_result", "understand"]

_CONFIDENCE = 0.95
_ALONE, _NODE = "alone", "node"
"""Roles of a sweep's baselines."""
_ONE_PROCESS = "one-process"
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """How fast one way of moving bytes is, over their number."""

    name: str
    is_limit: bool
    """Whether it is the copy or the link that others are measured against."""
    sizes: tuple[float, ...]
    gb_per_s: tuple[Estimate, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One result file."""

    name: str
    raw: Mapping[str, Any]
    studies: tuple[Study, ...] = ()
    bandwidths: tuple[Bandwidth, ...] = ()

    @property
    def benchmark(self) -> str:
        """What was measured."""
        return str(self.raw["benchmark"])

    @property
    def command(self) -> str | None:
        """What repeats it, where the result says so."""
        said = self.raw.get("scale", {}).get("command") or self.raw["settings"].get("command")
        return " ".join(said) if isinstance(said, list) else said


def read_result(path: Path) -> Result:
    """Read a result file.

    Raises:
        ConfigError: it cannot be read, or is no result.
    """
    try:
        raw = upgrade(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a result ({error})") from error
    wrong = validate(raw)
    if wrong or not isinstance(raw, dict):
        raise ConfigError(
            f"{path} is no benchmark result: {'; '.join(wrong[:3])}; give files that `hpctrain "
            "bench` wrote, or run directories"
        )
    return understand(raw, path.stem)


def understand(raw: Mapping[str, Any], name: str) -> Result:
    """See what kind of result it is. Pure."""
    if raw["benchmark"] == "collectives":
        return Result(name=name, raw=raw, bandwidths=tuple(_bandwidths(raw["series"])))
    if isinstance(raw.get("scale"), Mapping):
        return Result(name=name, raw=raw, studies=(_swept(raw),))
    if raw["benchmark"] == "layout":
        cases = dict.fromkeys(item["case"] for item in raw["series"])
        return Result(name=name, raw=raw, studies=tuple(_layouts(raw, case) for case in cases))
    return Result(name=name, raw=raw)


def _swept(raw: Mapping[str, Any]) -> Study:
    """What `hpctrain bench scale` and `bench layout` write, under the key `scale`."""
    scale = raw["scale"]
    names = curve_names(scale["points"])
    points = [(row.get("role"), _swept_point(row, names[row["name"]])) for row in scale["points"]]
    return Study(
        title=str(scale.get("program") or raw["benchmark"]),
        mode="layout" if raw["benchmark"] == "layout" else str(scale.get("mode", "weak")),
        points=tuple(point for role, point in points if role not in (_ALONE, _NODE)),
        baselines=_of_role(points, _ALONE),
        whole_nodes=_of_role(points, _NODE),
        fits=tuple(_fits(raw)),
        doubts=tuple(doubts_of(raw)),
        notes=tuple(map(str, scale.get("notes", ()))),
        unit="launch" if scale.get("measured") == "launches" else "step",
    )


def _fits(raw: Mapping[str, Any]) -> Iterator[str]:
    """What laws describe the curves, and what the settings make of speed."""
    for curve in conclude_result(raw):
        yield from describe_law(curve)
    yield from describe_settings(raw)


def doubts_of(raw: Mapping[str, Any]) -> Iterator[str]:
    """Why the numbers of a result should not be quoted. Pure."""
    rounds, noisy = len(raw.get("blocks", ())), raw.get("num_noisy", 0)
    if noisy:
        yield f"{noisy} of {rounds} rounds were disturbed by others: do not quote these numbers."
    if rounds == 1 and isinstance(raw.get("scale"), Mapping):
        yield (
            "Every point was measured once, so the intervals say nothing: no difference can be "
            "told from noise. Measure with --repeats 6 or more."
        )


def _swept_point(row: Mapping[str, Any], curve: str) -> Point:
    counts = row.get("counts") or {}
    samples = row.get("samples_per_step")
    return Point(
        engine=_name_of(row, curve),
        num_ranks=row["num_ranks"],
        num_threads=row.get("num_threads", 1),
        num_nodes=row.get("num_nodes", 1),
        step_s=_read_interval(row, "step_s") or _read_interval(row, "launch_s"),
        global_batch=None if samples is None else round(samples),
        rate=row.get("samples_per_s"),
        efficiency=_read_interval(row, "efficiency"),
        speedup=_read_interval(row, "speedup"),
        over_node=_read_interval(row, "over_node"),
        split_s=_split(row),
        per_sequential_s=row.get("speedup_per_sequential_s"),
        per_million_parameters=row.get("speedup_per_million_parameters"),
        bytes_sent=counts.get("bytes"),
        memory_bytes=row.get("memory_bytes"),
        values=row.get("values") or {},
        failure=str(row.get("why") or ""),
    )


def _name_of(row: Mapping[str, Any], name: str) -> str:
    """What a point is called; whether its optimizer is fused as it was, not as it was asked for."""
    if row.get("role") == _NODE:
        return name.replace(" fused=on", ", fused" if row.get("is_fused") else "")
    return name


def _read_interval(row: Mapping[str, Any], name: str) -> Estimate | None:
    middle = row.get(name)
    if middle is None:
        return None
    low, high = row.get(f"{name}_low", middle), row.get(f"{name}_high", middle)
    return Estimate(median=middle, low=low, high=high)


def _split(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by part; waiting for the slowest rank is in `exchange`, and is drawn apart."""
    parts = {k: float(v) for k, v in (row.get("split_s") or {}).items() if k in PARTS}
    late = min(float(row.get("straggling_s") or 0.0), parts.get("exchange", 0.0))
    if late > 0:
        parts["exchange"] -= late
        parts["straggling"] = late
    return parts


def _layouts(raw: Mapping[str, Any], case: str) -> Study:
    """What `benchmarks.layout` writes: a case for every model, and kinds side by side."""
    batches = raw["settings"].get("batches")
    batch = batches.get(case) if isinstance(batches, Mapping) else None
    points = [
        (
            item["kind"],
            Point(
                engine=item["kind"],
                num_ranks=item["num_ranks"],
                num_threads=item["num_threads"],
                step_s=estimate(item["seconds"]) if item["seconds"] else None,
                global_batch=batch,
                bytes_sent=item["counts"].get("bytes"),
                failure="" if item["seconds"] else "it gave no times",
            ),
        )
        for item in raw["series"]
        if item["case"] == case
    ]
    return Study(
        title=case,
        mode="layout",
        doubts=tuple(doubts_of(raw)),
        points=tuple(point for kind, point in points if kind != _ONE_PROCESS),
        whole_nodes=_of_role(points, _ONE_PROCESS),
    )


def _of_role(points: Iterable[tuple[Any, Point]], role: str) -> tuple[Point, ...]:
    return tuple(point for kind, point in points if kind == role)


def estimate(values: Sequence[float]) -> Estimate:
    """The median of measured values, with its interval. Pure."""
    ordered = sorted(values)
    first, last, _ = interval_ranks(len(ordered), _CONFIDENCE)
    return Estimate(median=median(ordered), low=ordered[first], high=ordered[last])


def _bandwidths(series: Sequence[Mapping[str, Any]]) -> list[Bandwidth]:
    names = dict.fromkeys(item["variant"] for item in series)
    found = []
    for name in names:
        mine = [(item, _bytes_of(item["case"])) for item in series if item["variant"] == name]
        sized = sorted(
            ((size, item) for item, size in mine if size and item["seconds"]),
            key=lambda one: one[0],
        )
        if not sized:
            continue
        is_limit = name in ("memcpy", "link")
        found.append(
            Bandwidth(
                name=name,
                is_limit=is_limit,
                sizes=tuple(float(size) for size, _ in sized),
                gb_per_s=tuple(_speed(size, item, is_limit) for size, item in sized),
            )
        )
    return found


def _speed(size: int, item: Mapping[str, Any], is_limit: bool) -> Estimate:
    """Bytes over time; of a collective what a ring would move (busbw), so that it compares."""
    ranks = item["num_ranks"]
    factor = 1.0 if is_limit or ranks == 1 else 2 * (ranks - 1) / ranks
    speeds = [factor * size / seconds / 1e9 for seconds in item["seconds"]]
    return estimate(speeds)


def _bytes_of(case: str) -> int | None:
    match = re.match(r"([\d.]+) (B|KiB|MiB|GiB)\b", case)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None
