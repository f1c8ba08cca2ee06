"""Result files, and the scaling studies in them: efficiency, speed-up, serial fraction.

Efficiency limits, Karp-Flatt fractions and their trends are those of `hpctrain.bench`: both are one
computation on the same figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain.bench import (
    KarpFlatt,
    conclude_result,
    curve_names,
    describe_law,
    describe_settings,
    interval_ranks,
    is_alike,
    judge_reach,
    karp_flatt,
    serial_fraction,
    trend,
    upgrade,
    validate,
)
from hpctrain.errors import ConfigError

__all__ = [
    "PARTS",
    "Bandwidth",
    "Estimate",
    "Result",
    "Study",
    "StudyPoint",
    "doubts_of",
    "estimate",
    "read_result",
    "understand",
]

PARTS = ("input", "forward", "backward", "exchange", "update", "straggling", "other")
"""What a step is split into, in the order in which it is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number with its interval."""

    median: float
    low: float
    high: float

    @property
    def is_repeated(self) -> bool:
        """Whether there is an interval: a single measurement has none, and decides nothing."""
        return self.low < self.high

    def scaled(self, factor: float) -> Estimate:
        """The same times a number above 0."""
        return Estimate(median=factor * self.median, low=factor * self.low, high=factor * self.high)

    def over(self, other: Estimate) -> Estimate:
        """A ratio; its interval is as wide as the two intervals allow."""
        return Estimate(
            median=self.median / other.median,
            low=self.low / other.high,
            high=self.high / other.low,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPoint:
    """One way of training, measured."""

    engine: str
    num_ranks: int
    num_threads: int = 1
    num_nodes: int = 1
    step_s: Estimate | None = None
    """None: it failed; `failure` says why."""
    global_batch: int | None = None
    rate: float | None = None
    """Samples a second, where the sweep itself has counted them, block by block."""
    efficiency: Estimate | None = None
    speedup: Estimate | None = None
    """Where the sweep itself has compared with its baseline, block by block."""
    over_node: Estimate | None = None
    """Speed over that of one process with all cores of the node."""
    split_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step, by part; empty where the parts were not timed."""
    per_sequential_s: float | None = None
    per_million_parameters: float | None = None
    """Speed-up per second of the undistributed step, and per million parameters."""
    bytes_sent: float | None = None
    memory_bytes: float | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    """Settings that the sweep varied."""
    failure: str = ""

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together."""
        if self.rate is not None:
            return self.rate
        if self.step_s is None or self.global_batch is None:
            return None
        return self.global_batch / self.step_s.median

    @property
    def layout(self) -> str:
        """Ranks and threads, in words."""
        return f"{self.num_ranks} x {self.num_threads}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """One model, swept over numbers of ranks."""

    title: str
    mode: str
    """`weak`: the batch grows with the ranks; `strong`: it stays; `layout`: so do the cores."""
    points: tuple[StudyPoint, ...]
    baselines: tuple[StudyPoint, ...] = ()
    """Undistributed, on the cores of one rank: what efficiency is measured against; one for every
    setting that was varied."""
    whole_nodes: tuple[StudyPoint, ...] = ()
    """One process with all cores of the node and a fused optimizer; one for every setting."""
    fits: tuple[str, ...] = ()
    """What laws were fitted, in words."""
    doubts: tuple[str, ...] = ()
    """Why its numbers should not be quoted."""
    notes: tuple[str, ...] = ()
    """How it was measured, for the reader."""
    unit: str = "step"
    """What was timed: a `step`, or a whole `launch` of a script that reports no steps."""

    @cached_property
    def engines(self) -> tuple[str, ...]:
        """In the order in which they were measured."""
        return tuple(dict.fromkeys(point.engine for point in self.points))

    @cached_property
    def measured(self) -> tuple[StudyPoint, ...]:
        """The points that did not fail."""
        return tuple(point for point in self.points if point.step_s is not None)

    @cached_property
    def failed(self) -> tuple[StudyPoint, ...]:
        """The points that failed."""
        return tuple(point for point in self.points if point.step_s is None)

    def of_engine(self, engine: str) -> tuple[StudyPoint, ...]:
        """One engine's points by number of ranks."""
        mine = [point for point in self.measured if point.engine == engine]
        return tuple(sorted(mine, key=lambda point: point.num_ranks))

    @cached_property
    def asides(self) -> tuple[StudyPoint, ...]:
        """One process each: baselines, then whole nodes."""
        return (*self.baselines, *self.whole_nodes)

    def base_of(self, point: StudyPoint) -> StudyPoint | None:
        """What a point is compared with: the same undistributed, else its engine's fewest ranks."""
        for base in self.baselines:
            if base.step_s is not None and is_alike(point.values, base.values):
                return base
        return next(iter(self.of_engine(point.engine)), None)

    def node_of(self, point: StudyPoint) -> StudyPoint | None:
        """One process with all cores and the settings of a point."""
        nodes = (node for node in self.whole_nodes if node.step_s is not None)
        return next((node for node in nodes if is_alike(point.values, node.values)), None)

    def efficiency(self, point: StudyPoint) -> Estimate | None:
        """How much of the ideal speed a point reaches; 1 is all of it."""
        if point.efficiency is not None:
            return point.efficiency
        base = self.base_of(point)
        if base is None or base.step_s is None or point.step_s is None:
            return None
        growth = point.num_ranks / base.num_ranks
        if base.global_batch and point.global_batch:
            work = point.global_batch / base.global_batch
        else:
            work = growth if self.mode == "weak" else 1.0
        return base.step_s.over(point.step_s).scaled(work / growth)

    def speed_up(self, point: StudyPoint) -> Estimate | None:
        """How many times as much a point trains in the same time as its base."""
        if point.speedup is not None:
            return point.speedup
        efficiency = self.efficiency(point)
        base = self.base_of(point)
        if efficiency is None or base is None:
            return None
        return efficiency.scaled(point.num_ranks / base.num_ranks)

    def growth(self, point: StudyPoint) -> float:
        """How many times as many ranks a point has as its base."""
        base = self.base_of(point)
        return point.num_ranks / base.num_ranks if base is not None else 1.0

    def serial_fraction(self, point: StudyPoint) -> float | None:
        """The Karp-Flatt fraction of a point; rising with ranks, it is overhead that grows."""
        speed_up = self.speed_up(point)
        if speed_up is None or self.growth(point) <= 1:
            return None
        return serial_fraction(speed_up.median, self.growth(point))

    def serial_trend(self, engine: str) -> tuple[list[KarpFlatt], str]:
        """The Karp-Flatt fractions of an engine, by multiples of its base, and their trend."""
        found = [(p, self.speed_up(p)) for p in self.of_engine(engine) if self.growth(p) > 1]
        known = [(p, speed_up) for p, speed_up in found if speed_up is not None]
        whole = all(float(self.growth(p)).is_integer() for p, _ in known)
        if not known or not whole:
            return [], "unknown"
        series = karp_flatt({int(self.growth(p)): (s.median, s.low, s.high) for p, s in known})
        return series, trend(series, is_repeated=any(s.is_repeated for _, s in known))

    def reach(self, engine: str) -> dict[str, Any]:
        """At which numbers of ranks an engine's efficiency is at the limit or above."""
        known = {p.num_ranks: e.median for p in self.of_engine(engine) if (e := self.efficiency(p))}
        return judge_reach(known)

    def best(self) -> StudyPoint | None:
        """The point that trains fastest."""
        if self.mode == "layout":  # the same batch everywhere
            return min(self.measured, key=lambda point: _median(point.step_s), default=None)
        rated = [point for point in self.measured if point.samples_per_s is not None]
        if rated and len(rated) == len(self.measured):
            return max(rated, key=lambda point: point.samples_per_s or 0.0)
        return max(
            (point for point in self.measured if self.speed_up(point)),
            key=lambda point: _median(self.speed_up(point)),
            default=None,
        )


def _median(estimate: Estimate | None) -> float:
    return estimate.median if estimate is not None else 0.0


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
        ConfigError: it cannot be read, or is not a result.
    """
    try:
        raw = upgrade(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a result ({error})") from error
    wrong = validate(raw)
    if wrong or not isinstance(raw, dict):
        raise ConfigError(
            f"{path} is not a benchmark result: {'; '.join(wrong[:3])}; give files that `hpctrain "
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
        yield (
            f"{noisy} of {rounds} rounds were disturbed by other processes: do not quote these "
            "numbers."
        )
    if rounds == 1 and isinstance(raw.get("scale"), Mapping):
        yield (
            "Every point was measured once, so the intervals say nothing: no difference can be "
            "told from noise. Measure with --repeats 6 or more."
        )


def _swept_point(row: Mapping[str, Any], curve: str) -> StudyPoint:
    counts = row.get("counts") or {}
    samples = row.get("samples_per_step")
    return StudyPoint(
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
            StudyPoint(
                engine=item["kind"],
                num_ranks=item["num_ranks"],
                num_threads=item["num_threads"],
                step_s=estimate(item["seconds"]) if item["seconds"] else None,
                global_batch=batch,
                bytes_sent=item["counts"].get("bytes"),
                failure="" if item["seconds"] else "no times were recorded",
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


def _of_role(points: Iterable[tuple[Any, StudyPoint]], role: str) -> tuple[StudyPoint, ...]:
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
