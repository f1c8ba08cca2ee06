"""Sweeps: points over keys, and the argument vector of each. Pure but for the files of results.

The seam to whatever is run is one argument vector with `{key}` placeholders: this module knows
nothing of trainings. Each point has a run directory; the command leaves `result.json` there, or is
a training from a file, which leaves `summary.json`.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError

__all__ = [
    "RESULT",
    "fill",
    "grid_points",
    "list_points",
    "open_sweep",
    "random_points",
    "read_results",
    "sweep_commands",
    "write_sweep",
]

RESULT = "result.json"
_SUMMARY = "summary.json"
_MANIFEST = "sweep.json"
_OWN = ("run_dir", "index")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)\}")
_DRAW = re.compile(r"(uniform|loguniform|int|choice)\((.*)\)")
_MOST = 1000

Point = Mapping[str, str]


def grid_points(axes: Sequence[str]) -> list[Point]:
    """All combinations of `key=a,b,c`, the last key fastest.

    Raises:
        ConfigError: an axis is not understood or comes twice, or there are too many points.
    """
    values: dict[str, list[str]] = {}
    for axis in axes:
        key, text = _split(axis)
        words = text.split(",")
        if key in values or "" in words or len(set(words)) != len(words):
            raise ConfigError(f"axis {axis!r} comes twice, or a value of it is empty or repeated")
        values[key] = words
    _check_count(math.prod(len(words) for words in values.values()))
    return [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]


def random_points(draws: Sequence[str], *, count: int, seed: int) -> list[Point]:
    """`count` points drawn from `key=uniform(a,b)`, loguniform, int or choice; fixed by the seed.

    Raises:
        ConfigError: a distribution is not understood.
    """
    _check_count(count)
    generator = random.Random(seed)
    rules: dict[str, tuple[str, list[str]]] = {}
    for draw in draws:
        key, text = _split(draw)
        match = _DRAW.fullmatch(text)
        if match is None or key in rules:
            raise ConfigError(
                f"{draw!r} is not understood, or comes twice; write key=uniform(0,1), "
                "loguniform(1e-5,1e-1), int(1,8) or choice(a,b)"
            )
        rules[key] = (match.group(1), [word.strip() for word in match.group(2).split(",")])
    return [
        {key: _draw(generator, key, kind, words) for key, (kind, words) in rules.items()}
        for _ in range(count)
    ]


def _draw(generator: random.Random, key: str, kind: str, words: Sequence[str]) -> str:
    if kind == "choice":
        return generator.choice(words)
    try:
        low, high = (float(word) for word in words)
        whole = kind != "int" or (low.is_integer() and high.is_integer())
    except ValueError:
        low, high, whole = 1.0, 0.0, False
    lowest = 0.0 if kind == "loguniform" else -math.inf
    if not (lowest < low < high < math.inf and whole):
        raise ConfigError(
            f"{key}={kind}({','.join(words)}) needs two numbers, the lower first; loguniform "
            "positive ones, int whole ones"
        )
    if kind == "int":
        return str(generator.randint(int(low), int(high)))
    if kind == "uniform":
        return repr(generator.uniform(low, high))
    return repr(math.exp(generator.uniform(math.log(low), math.log(high))))


def list_points(text: str) -> list[Point]:
    """The points of a JSON list of objects, all with the same keys.

    Raises:
        ConfigError: it is none.
    """
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the list of points is no JSON: {error}") from error
    flat = isinstance(rows, list) and all(
        isinstance(row, dict) and all(isinstance(v, str | int | float) for v in row.values())
        for row in rows
    )
    if not flat or not rows or any(row.keys() != rows[0].keys() for row in rows):
        raise ConfigError(
            'the list of points must be a JSON list of objects with the same keys, as [{"lr": 0.1}]'
        )
    _check_count(len(rows))
    for key in rows[0]:
        _split(f"{key}=x")
    return [{key: _text(value) for key, value in row.items()} for row in rows]


def _text(value: str | int | float) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def fill(template: Sequence[str], point: Point, *, run_dir: Path, index: int) -> tuple[str, ...]:
    """The argument vector of one point.

    Raises:
        ConfigError: a placeholder has no value, or a key of the point has no placeholder.
    """
    values = {**point, "run_dir": str(run_dir), "index": str(index)}
    used = {name for word in template for name in _PLACEHOLDER.findall(word)}
    if unknown := sorted(used - set(values)):
        raise ConfigError(
            f"the command has {{{unknown[0]}}}, and the sweep has {', '.join(sorted(values))}"
        )
    if idle := sorted(set(point) - used):
        raise ConfigError(f"the command has no {{{idle[0]}}}, so sweeping it would change nothing")
    return tuple(_PLACEHOLDER.sub(lambda match: values[match.group(1)], word) for word in template)


def sweep_commands(
    directory: Path, points: Sequence[Point], template: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """The argument vector of each point.

    Raises:
        ConfigError: placeholders and keys do not go together.
    """
    return tuple(
        fill(template, point, run_dir=_folder(directory, index), index=index)
        for index, point in enumerate(points)
    )


def write_sweep(
    directory: Path, points: Sequence[Point], commands: Sequence[Sequence[str]]
) -> None:
    """Make the run directories and the manifest.

    Raises:
        ConfigError: another sweep is in that directory, of which something was run.
    """
    manifest = {"version": 1, "points": [dict(point) for point in points], "commands": commands}
    text = json.dumps(manifest, indent=1)
    path = directory / _MANIFEST
    try:
        known = path.exists() and path.read_text(encoding="utf-8") != text
        if known and any(
            folder.is_dir() and any(folder.iterdir()) for folder in directory.iterdir()
        ):
            raise ConfigError(f"{directory} has another sweep; choose a new --dir")
        for index in range(len(points)):
            _folder(directory, index).mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written ({error}); choose another") from error


def _folder(directory: Path, index: int) -> Path:
    return directory / f"{index:04d}"


def open_sweep(directory: Path) -> list[Point]:
    """The points of a sweep that is there.

    Raises:
        ConfigError: there is none.
    """
    try:
        points: list[Point] = json.loads((directory / _MANIFEST).read_text("utf-8"))["points"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{directory} has no sweep ({error}); give --dir") from error
    return points


def read_results(directory: Path, metric: str, *, largest: bool) -> list[dict[str, Any]]:
    """One row per point, the best first and those without a result last.

    Raises:
        ConfigError: there is no sweep, it sweeps a key of that name, or no point has that metric.
    """
    points = open_sweep(directory)
    if metric in ("index", *points[0]):
        raise ConfigError(f"{metric} is what the sweep changes, not what it measures; see --metric")
    found = [_numbers(_folder(directory, index)) for index in range(len(points))]
    known = sorted({name for numbers in found for name in numbers})
    if known and metric not in known:
        raise ConfigError(f"no point has {metric!r}; there are {', '.join(known)}: give --metric")
    rows = [
        {"index": index, **point, metric: numbers.get(metric)}
        for index, (point, numbers) in enumerate(zip(points, found, strict=True))
    ]
    sign = -1 if largest else 1
    return sorted(rows, key=lambda row: (row[metric] is None, sign * (row[metric] or 0.0)))


def _numbers(folder: Path) -> dict[str, float | None]:
    """What a point measured; None for what is no number, or not finite in JSON."""
    for name in (RESULT, _SUMMARY):
        try:
            table = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(table, dict) and name == _SUMMARY:
            table = table.get("metrics") if table.get("state") == "finished" else None
        if isinstance(table, dict):
            return {key: _number(value) for key, value in table.items() if _may_count(value)}
    return {}


def _may_count(value: object) -> bool:
    return value is None or isinstance(value, int | float) or _number(value) is not None


def _number(value: object) -> float | None:
    if not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return None if math.isnan(number) else number


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key) or key in _OWN:
        raise ConfigError(
            f"{text!r} is not understood; write key=values, with a key other than run_dir and index"
        )
    return key, value


def _check_count(count: int) -> None:
    if not 1 <= count <= _MOST:
        raise ConfigError(f"{count} points are not possible; give 1 to {_MOST}")
