"""A sweep on disk: its plan, and one small file for every launch that has been measured."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hpctrain.bench.points import Point, Settings, interleave
from hpctrain.errors import ConfigError

__all__ = ["Folder", "Measured", "Sweep", "fill_arguments", "global_batch", "tell_difference"]

_VERSION = 1
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Everything that decides what is measured."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    settings: Settings
    points: tuple[Point, ...]
    kind: str = "scale"
    """Or `layout`."""
    label: str = ""
    """What a user calls it; empty: as the target is called."""

    @property
    def title(self) -> str:
        """What is measured, in a few words; no path."""
        name = self.target if self.is_module else Path(self.target).name
        return f"{self.label or name} {self.settings.mode}"

    def point(self, name: str) -> Point:
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
    """What went wrong; empty when nothing did."""
    foreign_load: float | None = None
    """None where nobody watched, as in a batch job with nodes of its own."""
    report: Mapping[str, Any] | None = field(default=None)
    """What the replica said of its steps; None: the script has none."""
    num_tries: int = 1


_PLAIN = [each for each in fields(Sweep) if each.name not in ("settings", "points")]


def global_batch(point: Point, settings: Settings) -> int | None:
    """Samples of all ranks together, where the sweep names them. Pure."""
    return None if settings.batch is None else settings.batch * point.factor


def fill_arguments(sweep: Sweep, point: Point) -> tuple[tuple[str, ...], frozenset[str]]:
    """The script's arguments at a point, and the names that stood in them. Pure.

    Raises:
        ConfigError: `{batch}` is there, and the sweep names no batch.
    """
    batch = global_batch(point, sweep.settings)
    known = {**point.values, "ranks": str(point.num_ranks), "engine": point.engine}
    if batch is not None:
        known["batch"] = str(batch)
    used = {n for word in sweep.arguments for n in _PLACEHOLDER.findall(word)}
    if "batch" in used and batch is None:
        raise ConfigError("the arguments have {batch}, so the sweep must name one; give --batch")

    def put(match: re.Match[str]) -> str:
        return known.get(match[1], match[0])  # other braces are the script's own

    words = tuple(_PLACEHOLDER.sub(put, word) for word in sweep.arguments)
    return words, frozenset(used & known.keys())


def tell_difference(there: Sweep, asked: Sweep) -> str:
    """What another sweep has, and this one asks for. Pure."""
    pairs = [(each.name, getattr(there, each.name), getattr(asked, each.name)) for each in _PLAIN]
    pairs += [
        (each.name, getattr(there.settings, each.name), getattr(asked.settings, each.name))
        for each in fields(Settings)
    ]
    said = [
        f"{name}: {_show(old)} there, {_show(new)} asked" for name, old, new in pairs if old != new
    ]
    old, new = ([point.name for point in sweep.points] for sweep in (there, asked))
    for verb, names in (
        ("has", [name for name in old if name not in new]),
        ("lacks", [name for name in new if name not in old]),
    ):
        if names:
            said.append(f"it {verb} the points {', '.join(names)}")
    if not said and there.points != asked.points:
        said.append("points of the same name have other settings")
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
                settings=Settings(**table["settings"]),
                points=tuple(Point(**row) for row in table["points"]),
                kind=table["kind"],
                label=table["label"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.path} has no sweep ({error}); name the folder that one is kept in"
            ) from error

    def begin(self, sweep: Sweep) -> None:
        """Write the plan down, or go on with the same one.

        Raises:
            ConfigError: another sweep is there, or it cannot be written.
        """
        text = json.dumps({"version": _VERSION, **asdict(sweep)}, indent=1)
        path = self.path / "sweep.json"
        try:
            if path.exists() and path.read_text("utf-8") != text:
                raise ConfigError(
                    f"{self.path} has another sweep: {tell_difference(self.open(), sweep)}; choose "
                    "another --dir, or remove it"
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

    def launch_of(self, sweep: Sweep, key: str) -> tuple[Point, int]:
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
        """Where the launches ran; None: nobody has said."""
        try:
            table: dict[str, Any] = json.loads((self.path / "machine.json").read_text("utf-8"))
        except FileNotFoundError:
            return None
        return table

    def write(self, key: str, measured: Measured) -> None:
        """Keep a launch; complete or not at all."""
        path = self.path / "measured" / f"{key}.json"
        fresh = path.with_suffix(f".{os.getpid()}.new")
        fresh.write_text(json.dumps(asdict(measured)), encoding="utf-8")
        fresh.replace(path)

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
