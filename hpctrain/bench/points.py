"""Which launches a sweep consists of. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.errors import ConfigError

__all__ = ["ALONE", "MODES", "NODE", "Point", "Settings", "interleave", "layouts", "plan_points"]

MODES = ("weak", "strong")
ALONE = "alone"
"""The undistributed baseline: one process with one rank's cores."""
NODE = "node"
"""One process with all cores of a node: what a user of one node has already."""
RANKS = "ranks"
_RESERVED = ("batch", "engine", "ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How every point is measured."""

    mode: str = "weak"
    batch: int | None = None
    """Samples a rank (weak) or of all ranks (strong); None: the script's own."""
    steps: int = 20
    warmup: int = 3
    repeats: int = 3
    load_limit: float = 0.05
    retries: int = 1
    """How often a measurement under foreign load is repeated."""
    seed: int = 0
    timeout_s: float = 600.0
    """Of one launch."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode {self.mode!r} is unknown; choose from {', '.join(MODES)}")
        least = {"steps": 0, "warmup": 0, "repeats": 1, "retries": 0, "load_limit": 0}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {number}")
        if self.batch is not None and self.batch < 1:
            raise ConfigError(f"batch={self.batch} must be at least 1")
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s={self.timeout_s} must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One kind of launch, measured several times."""

    name: str
    role: str
    """`ranks`, or a baseline: `alone`, `node`."""
    engine: str
    """`auto` leaves the choice to the script."""
    num_ranks: int
    num_threads: int
    num_nodes: int = 1
    factor: int = 1
    """Shares of the batch that the ranks have together."""
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What the points of one curve have in common."""
        words = [self.engine if self.role == RANKS else self.role]
        return " ".join([*words, *(f"{k}={v}" for k, v in self.values.items())])


def plan_points(
    *,
    mode: str,
    ranks: Sequence[int],
    engines: Sequence[str],
    num_cores: int,
    num_threads: int | None = None,
    vary: Sequence[str] = (),
    ranks_per_node: int | None = None,
) -> list[Point]:
    """Every number of ranks on every engine with every setting, and two baselines a setting.

    Args:
        mode: `weak`: each rank brings its share; `strong`: the ranks divide one batch.
        ranks: Numbers of ranks.
        engines: Names, `auto` among them.
        num_cores: Of a node.
        num_threads: Of each rank; None: what the largest number of ranks on a node leaves to each.
        vary: Axes `key=a,b`.
        ranks_per_node: Where ranks are on several nodes; None: all are on this one.

    Raises:
        ConfigError: something of it is not possible.
    """
    if not ranks or min(ranks) < 1:
        raise ConfigError(f"ranks {list(ranks)} must be whole numbers of at least 1")
    most = min(max(ranks), ranks_per_node or max(ranks))
    threads = num_threads or max(1, num_cores // most)
    if threads < 1:
        raise ConfigError(f"threads={num_threads} must be at least 1")
    weak = mode == "weak"
    points: list[Point] = []
    for values in _combine(vary):
        tail = "".join(f" {key}={value}" for key, value in values.items())
        alone = Point(
            name=f"{ALONE} 1x{threads}{tail}",
            role=ALONE,
            engine="local",
            num_ranks=1,
            num_threads=threads,
            values=values,
        )
        points.append(alone)
        if num_cores > threads:
            points.append(
                Point(
                    name=f"{NODE} 1x{num_cores}{tail}",
                    role=NODE,
                    engine="local",
                    num_ranks=1,
                    num_threads=num_cores,
                    factor=most if weak else 1,
                    values={**values, "fused": values.get("fused", "on")},
                )
            )
        for engine, number in itertools.product(engines, sorted(set(ranks))):
            points.append(
                Point(
                    name=f"{engine} {number}x{threads}{tail}",
                    role=RANKS,
                    engine=engine,
                    num_ranks=number,
                    num_threads=threads,
                    num_nodes=-(-number // (ranks_per_node or number)),
                    factor=number if weak else 1,
                    values=values,
                )
            )
    return points


def layouts(num_cores: int, *, engine: str = "auto", values: Mapping[str, str]) -> list[Point]:
    """Every division of a node's cores into ranks x threads, at one batch; one process first."""
    found = [
        Point(
            name=f"{NODE} 1x{num_cores}",
            role=NODE,
            engine="local",
            num_ranks=1,
            num_threads=num_cores,
            values=values,
        )
    ]
    for number in range(2, num_cores + 1):
        if num_cores % number == 0:
            threads = num_cores // number
            found.append(
                Point(
                    name=f"{engine} {number}x{threads}",
                    role=RANKS,
                    engine=engine,
                    num_ranks=number,
                    num_threads=threads,
                    values=values,
                )
            )
    return found


def interleave(names: Sequence[str], *, repeats: int, seed: int) -> list[tuple[str, int]]:
    """Every point once, in a shuffled order, then all of them again: what drifts falls on all."""
    order: list[tuple[str, int]] = []
    for repeat in range(repeats):
        shuffled = list(names)
        random.Random(f"{seed}/{repeat}").shuffle(shuffled)
        order += [(name, repeat) for name in shuffled]
    return order


def _combine(vary: Sequence[str]) -> list[dict[str, str]]:
    axes: dict[str, list[str]] = {}
    for axis in vary:
        key, equals, text = axis.partition("=")
        words = text.split(",")
        named = all(part.isidentifier() for part in key.split(".")) and key not in _RESERVED
        if not equals or not named or "" in words or key in axes:
            raise ConfigError(
                f"--vary {axis!r} is not understood; write key=a,b, each key once, and none of "
                f"{', '.join(_RESERVED)}"
            )
        axes[key] = words
    return [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]
