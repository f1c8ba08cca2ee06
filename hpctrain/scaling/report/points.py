"""What a sweep measured, point by point, and what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

__all__ = ["PARTS", "Estimate", "Point", "Study", "karp_flatt"]

PARTS = ("input", "forward", "backward", "exchange", "update", "straggling", "other")
"""What a step is split into, in the order in which it is drawn."""

_GOOD = 0.8


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
    baseline: Point | None = None
    """Undistributed, on the cores of one rank: what efficiency is measured against."""
    whole_node: Point | None = None
    """One process with all cores of the node and a fused optimizer."""
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

    def base_of(self, engine: str) -> Point | None:
        """What an engine's points are compared with: undistributed, else its fewest ranks."""
        if self.baseline is not None and self.baseline.step_s is not None:
            return self.baseline
        return next(iter(self.of_engine(engine)), None)

    def efficiency(self, point: Point) -> Estimate | None:
        """How much of the ideal speed a point reaches; 1 is all of it."""
        if point.efficiency is not None:
            return point.efficiency
        base = self.base_of(point.engine)
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
        efficiency = self.efficiency(point)
        base = self.base_of(point.engine)
        if efficiency is None or base is None:
            return None
        return efficiency.scaled(point.num_ranks / base.num_ranks)

    def serial_fraction(self, point: Point) -> float | None:
        """The Karp-Flatt fraction of a point; rising with ranks, it is overhead that grows."""
        speed_up = self.speed_up(point)
        base = self.base_of(point.engine)
        if speed_up is None or base is None or point.num_ranks <= base.num_ranks:
            return None
        return karp_flatt(speed_up.median, point.num_ranks / base.num_ranks)

    def best(self) -> Point | None:
        """The point that trains fastest."""
        if self.mode == "layout":  # the same batch everywhere
            return min(self.measured, key=lambda point: _median(point.step_s), default=None)
        return max(
            (point for point in self.measured if self.speed_up(point)),
            key=lambda point: _median(self.speed_up(point)),
            default=None,
        )

    def last_good(self, least: float = _GOOD) -> Point | None:
        """The largest number of ranks, of any engine, that keeps this efficiency."""
        good = [p for p in self.measured if _median(self.efficiency(p)) >= least]
        return max(good, key=lambda p: (p.num_ranks, _median(self.efficiency(p))), default=None)


def _median(estimate: Estimate | None) -> float:
    return estimate.median if estimate is not None else 0.0


def karp_flatt(speed_up: float, num_ranks: float) -> float:
    """The serial fraction that explains a speed-up."""
    return (1 / speed_up - 1 / num_ranks) / (1 - 1 / num_ranks)
