"""Sweeps: points over keys, the argument vector of each, their launches and their array jobs.

`hpctrain sweep` and the sweeps of `hpctrain bench` are made of these. The seam to whatever is run
is one argument vector with `{key}` placeholders: this module is independent of training. Each point
of `hpctrain sweep` has a run directory; the command leaves `result.json` there, or is a training
from a file, which leaves `summary.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import random
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.batch_systems import Ask, JobState, find_system
from hpctrain.errors import ConfigError
from hpctrain.submit.ledger import SubmittedJob, split_task
from hpctrain.submit.status import ask_states

__all__ = [
    "RESULT",
    "fill",
    "fill_words",
    "forget_exit",
    "grid_points",
    "job_states",
    "launch",
    "list_points",
    "note_exit",
    "note_jobs",
    "open_sweep",
    "random_points",
    "read_results",
    "sweep_commands",
    "task_states",
    "withdraw_sweep",
    "write_sweep",
]

RESULT = "result.json"
_SUMMARY = "summary.json"
_MANIFEST = "sweep.json"
_JOBS = "jobs.json"
_EXIT = "exit.json"
_OWN = ("run_dir", "index", "state")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)\}")
_DRAW = re.compile(r"(uniform|loguniform|int|choice)\((.*)\)")
_MOST = 1000
_END_S = 20.0

Point = Mapping[str, str]


def grid_points(axes: Sequence[str], *, reserved: Sequence[str] = _OWN) -> list[Point]:
    """All combinations of `key=a,b,c`, the last key fastest; one empty point where there are none.

    Args:
        axes: The keys with their values.
        reserved: Names that cannot be keys.

    Raises:
        ConfigError: an axis is not understood or comes twice, or there are too many points.
    """
    values: dict[str, list[str]] = {}
    for axis in axes:
        key, text = _split(axis, reserved)
        words = text.split(",")
        if key in values or "" in words or len(set(words)) != len(words):
            raise ConfigError(
                f"axis {axis!r} is not valid: it is repeated, or a value is empty or repeated; "
                "write key=a,b"
            )
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
                f"{draw!r} is not valid, or is repeated; write key=uniform(0,1), "
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
        raise ConfigError(f"the list of points is not JSON: {error}") from error
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


def fill_words(
    words: Sequence[str], values: Mapping[str, str]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Put values where their `{key}` stands; other braces stay.

    Returns:
        The words, and the names of all placeholders that were in them.
    """
    used = {name for word in words for name in _PLACEHOLDER.findall(word)}

    def put(match: re.Match[str]) -> str:
        return values.get(match[1], match[0])

    return tuple(_PLACEHOLDER.sub(put, word) for word in words), frozenset(used)


def fill(template: Sequence[str], point: Point, *, run_dir: Path, index: int) -> tuple[str, ...]:
    """The argument vector of one point.

    Raises:
        ConfigError: a placeholder has no value, or a key of the point has no placeholder.
    """
    values = {**point, "run_dir": str(run_dir), "index": str(index)}
    words, used = fill_words(template, values)
    if unknown := sorted(used - set(values)):
        raise ConfigError(
            f"the command has {{{unknown[0]}}}, and the sweep has {', '.join(sorted(values))}"
        )
    if idle := sorted(set(point) - used):
        raise ConfigError(f"the command has no {{{idle[0]}}}, so sweeping it would change nothing")
    return words


def sweep_commands(
    directory: Path, points: Sequence[Point], template: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """The argument vector of each point.

    Raises:
        ConfigError: placeholders and keys do not match.
    """
    return tuple(
        fill(template, point, run_dir=_folder(directory, index), index=index)
        for index, point in enumerate(points)
    )


def write_sweep(
    directory: Path, points: Sequence[Point], commands: Sequence[Sequence[str]]
) -> bool:
    """Make the run directories and the manifest.

    Returns:
        Whether there was no sweep before.

    Raises:
        ConfigError: another sweep is in that directory, of which something was run.
    """
    manifest = {"version": 1, "points": [dict(point) for point in points], "commands": commands}
    text = json.dumps(manifest, indent=1)
    path = directory / _MANIFEST
    try:
        is_new = not path.exists()
        known = not is_new and path.read_text(encoding="utf-8") != text
        if known and any(
            folder.is_dir() and any(folder.iterdir()) for folder in directory.iterdir()
        ):
            raise ConfigError(f"{directory} contains another sweep; choose a new --dir")
        for index in range(len(points)):
            _folder(directory, index).mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written ({error}); choose another") from error
    return is_new


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


def note_exit(directory: Path, index: int, code: int) -> None:
    """Keep how a point's command ended, for the table."""
    text = json.dumps({"exit_code": code})
    (_folder(directory, index) / _EXIT).write_text(text, encoding="utf-8")


def forget_exit(directory: Path, index: int) -> None:
    """A point's command is about to be run."""
    (_folder(directory, index) / _EXIT).unlink(missing_ok=True)


def note_jobs(directory: Path, entries: Sequence[SubmittedJob]) -> None:
    """Keep which jobs run the points: one array, or one job for each."""
    rows = [dataclasses.asdict(entry) for entry in entries]
    (directory / _JOBS).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def job_states(directory: Path, ask: Ask) -> dict[int, JobState]:
    """How the jobs of a sweep are doing, by point; empty where none were submitted."""
    try:
        rows = json.loads((directory / _JOBS).read_text("utf-8"))
        entries = [SubmittedJob(**row) for row in rows]
    except (OSError, ValueError, TypeError):
        return {}
    found: dict[int, JobState] = {}
    for number, entry in enumerate(entries):
        first = number if entry.array_size is None else 0
        found |= {first + task: state for task, state in task_states(entry, ask).items()}
    return found


def task_states(entry: SubmittedJob, ask: Ask) -> dict[int, JobState]:
    """How the tasks of a job are doing, counted from 0; a job that is not an array is task 0."""
    first = find_system(entry.batch).first_index
    found: dict[int, JobState] = {}
    for state in ask_states(entry, ask):
        task = split_task(entry, state.job)[1]
        if entry.array_size is None:
            found[0] = state
        elif task is not None:
            found[task - first] = state
        else:  # an array that waits as a whole
            found |= {each: state for each in range(entry.array_size) if each not in found}
    return found


def launch(
    command: Sequence[str],
    log: Path,
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> tuple[int, bool]:
    """Run one point's command on this machine, its output in a file, and end it with us.

    Returns:
        The exit code, and whether it ended by itself within the time.

    Raises:
        ConfigError: it cannot be started.
    """
    with log.open("wb") as said:
        try:
            process = subprocess.Popen(
                command,
                env=None if environ is None else dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error}") from error
        try:
            return process.wait(timeout=timeout_s), True
        except subprocess.TimeoutExpired:
            return _end(process), False
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)  # `hpctrain run` ends its ranks at once
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_END_S)
    process.kill()
    return process.wait(timeout=_END_S)


def withdraw_sweep(directory: Path) -> None:
    """Remove a sweep that the batch system did not accept, unless something was run in it."""
    with contextlib.suppress(OSError):
        for path in sorted(directory.glob("[0-9]*")):
            path.rmdir()
        (directory / _MANIFEST).unlink()
        directory.rmdir()


def read_results(
    directory: Path,
    metric: str,
    *,
    largest: bool,
    jobs: Mapping[int, JobState] | None = None,
) -> list[dict[str, Any]]:
    """One row per point, the best first and those without a result last.

    Args:
        directory: Of the sweep.
        metric: What to rank by.
        largest: Whether larger is better.
        jobs: How the job of each point is doing, for points that left no result themselves.

    Raises:
        ConfigError: there is no sweep, it sweeps a key of that name, or no point has that metric.
    """
    points = open_sweep(directory)
    if metric in ("index", "state", *points[0]):
        raise ConfigError(f"{metric} is varied by the sweep, not measured; see --metric")
    found = [_numbers(_folder(directory, index)) for index in range(len(points))]
    known = sorted({name for numbers in found for name in numbers})
    if known and metric not in known:
        raise ConfigError(f"no point has {metric!r}; there are {', '.join(known)}: give --metric")
    rows = [
        {
            "index": index,
            **point,
            metric: numbers.get(metric),
            "state": _tell_state(
                _folder(directory, index), numbers, metric, (jobs or {}).get(index)
            ),
        }
        for index, (point, numbers) in enumerate(zip(points, found, strict=True))
    ]
    sign = -1 if largest else 1
    return sorted(rows, key=lambda row: (row[metric] is None, sign * (row[metric] or 0.0)))


def _tell_state(
    folder: Path, numbers: Mapping[str, float | None], metric: str, job: JobState | None
) -> str:
    """The state of a point, in a word."""
    code, summary = _read(folder / _EXIT).get("exit_code"), _read(folder / _SUMMARY)
    if code:
        return f"failed (exit code {code})"
    if metric in numbers:
        return "finished" if numbers[metric] is not None else "NaN"
    if summary.get("state") == "failed":
        return "failed"
    if job is not None and job.is_final and job.state != "COMPLETED":
        told = "" if job.exit_code is None else f", exit code {job.exit_code}"
        return f"failed ({job.state}{told})"
    if numbers or code == 0 or (job is not None and job.state == "COMPLETED"):
        return f"no {metric}"
    if job is not None and job.state in ("PENDING", "RUNNING"):
        return job.state.lower()
    started = folder.is_dir() and any(folder.iterdir())
    return "unfinished" if started else "not started"


def _read(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


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


def _split(text: str, reserved: Sequence[str] = _OWN) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key) or key in reserved:
        raise ConfigError(
            f"{text!r} is not valid; write key=values, with a key other than {', '.join(reserved)}"
        )
    return key, value


def _check_count(count: int) -> None:
    if not 1 <= count <= _MOST:
        raise ConfigError(f"{count} points are not possible; give 1 to {_MOST}")
