"""A sweep: its points and settings (pure), and its folder on disk."""

from __future__ import annotations

import itertools
import json
import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hpctrain.atomic import write_atomically
from hpctrain.errors import ConfigError
from hpctrain.submit import fill_words, grid_points

__all__ = [
    "ALONE",
    "MODES",
    "NODE",
    "Folder",
    "Measured",
    "Sweep",
    "SweepPoint",
    "SweepSettings",
    "describe_difference",
    "fill_arguments",
    "global_batch",
    "interleave",
    "layout_points",
    "plan_points",
]

MODES = ("weak", "strong")
ALONE = "alone"
"""The undistributed baseline: one process with one rank's cores."""
NODE = "node"
"""One process with all cores of a node: what a single-node user already has."""
RANKS = "ranks"
_RESERVED = ("batch", "engine", "ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSettings:
    """How every point is measured."""

    mode: str = "weak"
    batch: int | None = None
    """Samples per rank (weak) or over all ranks (strong); None: the script's default."""
    steps: int = 20
    warmup: int = 3
    repeats: int = 3
    load_limit: float = 0.05
    retries: int = 1
    """How often a measurement under background load is repeated."""
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
class SweepPoint:
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
    """Total number of shares of the batch."""
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
) -> list[SweepPoint]:
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
    points: list[SweepPoint] = []
    for values in grid_points(vary, reserved=_RESERVED):
        tail = "".join(f" {key}={value}" for key, value in values.items())
        alone = SweepPoint(
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
                SweepPoint(
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
                SweepPoint(
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


def layout_points(
    num_cores: int, *, engine: str = "auto", values: Mapping[str, str]
) -> list[SweepPoint]:
    """Every division of a node's cores into ranks x threads, at one batch; one process first."""
    found = [
        SweepPoint(
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
                SweepPoint(
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


_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Everything that decides what is measured."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    settings: SweepSettings
    points: tuple[SweepPoint, ...]
    kind: str = "scale"
    """Or `layout`."""
    label: str = ""
    """The user's name for it; empty: the target's name."""

    @property
    def title(self) -> str:
        """What is measured, in a few words; no path."""
        name = self.target if self.is_module else Path(self.target).name
        return f"{self.label or name} {self.settings.mode}"

    def point(self, name: str) -> SweepPoint:
        """The point of that name."""
        return next(point for point in self.points if point.name == name)

    def order(self) -> list[tuple[str, int]]:
        """All launches: name and repeat, interleaved."""
        names = [point.name for point in self.points]
        return interleave(names, repeats=self.settings.repeats, seed=self.settings.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One launch that has ended."""

    point: str
    repeat: int
    wall_s: float
    why: str = ""
    """Why it failed; empty on success."""
    foreign_load: float | None = None
    """None if not monitored, as in a batch job with exclusive nodes."""
    report: Mapping[str, Any] | None = field(default=None)
    """The replica's step report; None if the script has no replica."""
    num_tries: int = 1


_PLAIN = [each for each in fields(Sweep) if each.name not in ("settings", "points")]


def global_batch(point: SweepPoint, settings: SweepSettings) -> int | None:
    """Samples of all ranks together, where the sweep names them. Pure."""
    return None if settings.batch is None else settings.batch * point.factor


def fill_arguments(sweep: Sweep, point: SweepPoint) -> tuple[tuple[str, ...], frozenset[str]]:
    """The script's arguments at a point, and the names that stood in them. Pure.

    Raises:
        ConfigError: `{batch}` is there, and the sweep names no batch.
    """
    batch = global_batch(point, sweep.settings)
    known = {**point.values, "ranks": str(point.num_ranks), "engine": point.engine}
    if batch is not None:
        known["batch"] = str(batch)
    words, used = fill_words(sweep.arguments, known)
    if "batch" in used and batch is None:
        raise ConfigError("the arguments contain {batch}, so a batch size is needed; give --batch")
    return words, frozenset(used & known.keys())


def describe_difference(there: Sweep, asked: Sweep) -> str:
    """How another sweep differs from this one. Pure."""
    pairs = [(each.name, getattr(there, each.name), getattr(asked, each.name)) for each in _PLAIN]
    pairs += [
        (each.name, getattr(there.settings, each.name), getattr(asked.settings, each.name))
        for each in fields(SweepSettings)
    ]
    said = [
        f"{name}: {_show(old)} there, {_show(new)} here" for name, old, new in pairs if old != new
    ]
    old, new = ([point.name for point in sweep.points] for sweep in (there, asked))
    for verb, names in (
        ("has", [name for name in old if name not in new]),
        ("lacks", [name for name in new if name not in old]),
    ):
        if names:
            said.append(f"it {verb} the points {', '.join(names)}")
    if not said and there.points != asked.points:
        said.append("points with the same name have different settings")
    return "; ".join(said) or "it was written by another version"


def _show(value: object) -> str:
    return shlex.join(value) or "none" if isinstance(value, tuple) else str(value)


class Folder:
    """A sweep's directory.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Sweep:
        """The sweep that is there.

        Raises:
            ConfigError: there is none.
        """
        try:
            table = json.loads((self.path / "sweep.json").read_text("utf-8"))
            return Sweep(
                target=table["target"],
                is_module=table["is_module"],
                arguments=tuple(table["arguments"]),
                settings=SweepSettings(**table["settings"]),
                points=tuple(SweepPoint(**row) for row in table["points"]),
                kind=table["kind"],
                label=table["label"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.path} has no sweep ({error}); give the folder of one"
            ) from error

    def begin(self, sweep: Sweep) -> None:
        """Write the plan, or resume the same one.

        Raises:
            ConfigError: another sweep is there, or it cannot be written.
        """
        text = json.dumps({"version": _VERSION, **asdict(sweep)}, indent=1)
        path = self.path / "sweep.json"
        try:
            if path.exists() and path.read_text("utf-8") != text:
                raise ConfigError(
                    f"{self.path} has another sweep: {describe_difference(self.open(), sweep)}; "
                    "choose another --dir, or remove it"
                )
            for name in ("measured", "reports", "logs"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written ({error}); give --dir") from error

    def key(self, sweep: Sweep, point: str, repeat: int) -> str:
        """The name of a launch's files."""
        index = [each.name for each in sweep.points].index(point)
        return f"{index:03d}-{repeat}"

    def launch_of(self, sweep: Sweep, key: str) -> tuple[SweepPoint, int]:
        """The point and the repeat that a key means.

        Raises:
            ConfigError: none of this sweep.
        """
        for name, repeat in sweep.order():
            if self.key(sweep, name, repeat) == key:
                return sweep.point(name), repeat
        raise ConfigError(f"{self.path} has no launch {key!r}")

    def report_path(self, key: str) -> Path:
        """Where rank 0 writes its step times."""
        return self.path / "reports" / f"{key}.json"

    def log_path(self, key: str) -> Path:
        """What a launch says."""
        return self.path / "logs" / f"{key}.log"

    def read_report(self, key: str) -> dict[str, Any] | None:
        """What the replica said of its steps; None where it said nothing."""
        try:
            report: dict[str, Any] = json.loads(self.report_path(key).read_text("utf-8"))
        except FileNotFoundError:
            return None
        return report

    def write_machine(self, machine: Mapping[str, Any]) -> None:
        """Keep where the launches run."""
        (self.path / "machine.json").write_text(json.dumps(machine), encoding="utf-8")

    def machine(self) -> dict[str, Any] | None:
        """Where the launches ran; None: not known."""
        try:
            table: dict[str, Any] = json.loads((self.path / "machine.json").read_text("utf-8"))
        except FileNotFoundError:
            return None
        return table

    def write(self, key: str, measured: Measured) -> None:
        """Keep a launch; complete or not at all."""
        path = self.path / "measured" / f"{key}.json"
        write_atomically(path, json.dumps(asdict(measured)))

    def forget(self, key: str) -> None:
        """Forget how a launch failed, because it is tried again."""
        (self.path / "measured" / f"{key}.json").unlink(missing_ok=True)

    def measured(self, sweep: Sweep) -> dict[tuple[str, int], Measured]:
        """What has been measured so far, by point and repeat."""
        found: dict[tuple[str, int], Measured] = {}
        for point, repeat in sweep.order():
            path = self.path / "measured" / f"{self.key(sweep, point, repeat)}.json"
            if path.exists():
                found[point, repeat] = Measured(**json.loads(path.read_text("utf-8")))
        return found

    def pending(self, sweep: Sweep) -> list[tuple[str, int]]:
        """What is still to be measured, in order; what failed is tried again."""
        done = self.measured(sweep)
        return [key for key in sweep.order() if key not in done or done[key].why]
