"""What a sweep measured, point by point, and what follows from it. Pure.

Efficiency limits, Karp-Flatt fractions and their trends are those of `hpctrain.bench`:
here and there they are one computation on the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hpctrain.bench.curves import is_alike, judge_reach
from hpctrain.bench.laws import KarpFlatt, karp_flatt, serial_fraction, trend

__all__ = ["PARTS", "Estimate", "Point", "Study"]

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
class Point:
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
    """Seconds of a step, by part; empty where nobody timed the parts."""
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
    points: tuple[Point, ...]
    baselines: tuple[Point, ...] = ()
    """Undistributed, on the cores of one rank: what efficiency is measured against; one for every
    setting that was varied."""
    whole_nodes: tuple[Point, ...] = ()
    """One process with all cores of the node and a fused optimizer; one for every setting."""
    fits: tuple[str, ...] = ()
    """What laws were fitted, in words."""
    doubts: tuple[str, ...] = ()
    """Why its numbers should not be quoted."""
    notes: tuple[str, ...] = ()
    """What a reader must know of how it was measured."""
    unit: str = "step"
    """What was timed: a `step`, or a whole `launch` of a script that tells no steps."""

    @cached_property
    def engines(self) -> tuple[str, ...]:
        """In the order in which they were measured."""
        return tuple(dict.fromkeys(point.engine for point in self.points))

    @cached_property
    def measured(self) -> tuple[Point, ...]:
        """The points that did not fail."""
        return tuple(point for point in self.points if point.step_s is not None)

    @cached_property
    def failed(self) -> tuple[Point, ...]:
        """The points that failed."""
        return tuple(point for point in self.points if point.step_s is None)

    def of_engine(self, engine: str) -> tuple[Point, ...]:
        """One engine's points by number of ranks."""
        mine = [point for point in self.measured if point.engine == engine]
        return tuple(sorted(mine, key=lambda point: point.num_ranks))

    @cached_property
    def asides(self) -> tuple[Point, ...]:
        """One process each: baselines, then whole nodes."""
        return (*self.baselines, *self.whole_nodes)

    def base_of(self, point: Point) -> Point | None:
        """What a point is compared with: the same undistributed, else its engine's fewest ranks."""
        for base in self.baselines:
            if base.step_s is not None and is_alike(point.values, base.values):
                return base
        return next(iter(self.of_engine(point.engine)), None)

    def node_of(self, point: Point) -> Point | None:
        """One process with all cores and the settings of a point."""
        nodes = (node for node in self.whole_nodes if node.step_s is not None)
        return next((node for node in nodes if is_alike(point.values, node.values)), None)

    def efficiency(self, point: Point) -> Estimate | None:
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

    def speed_up(self, point: Point) -> Estimate | None:
        """How many times as much a point trains in the same time as its base."""
        if point.speedup is not None:
            return point.speedup
        efficiency = self.efficiency(point)
        base = self.base_of(point)
        if efficiency is None or base is None:
            return None
        return efficiency.scaled(point.num_ranks / base.num_ranks)

    def growth(self, point: Point) -> float:
        """How many times as many ranks a point has as its base."""
        base = self.base_of(point)
        return point.num_ranks / base.num_ranks if base is not None else 1.0

    def serial_fraction(self, point: Point) -> float | None:
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

    def best(self) -> Point | None:
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
