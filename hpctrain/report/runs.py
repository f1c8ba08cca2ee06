"""A run directory as reports see it: what was logged, step by step, over all its restarts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError

__all__ = ["Run", "is_run", "is_trace", "parse_metrics", "read_run", "read_trace"]

_METRICS = "metrics.jsonl"
_TRACE = "trace-summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A training that was logged."""

    name: str
    lines: tuple[Mapping[str, Any], ...]
    """Of `metrics.jsonl`, each with `hours` since the first of them."""
    num_unreadable: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    trace: Mapping[str, Any] = field(default_factory=dict)
    """What is known of its timeline, where one was recorded."""
    folder: str = ""
    """As it was named."""

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """The lines of a kind: `step`, `epoch`, `eval` or `event`."""
        return [line for line in self.lines if line.get("kind") == kind]


def is_run(path: Path) -> bool:
    """Whether a path is a run directory."""
    return path.is_dir() and ((path / _METRICS).exists() or (path / "summary.json").exists())


def read_run(folder: Path) -> Run:
    """Read a run directory; what is not there is left out.

    Raises:
        ConfigError: there is nothing of a run in it.
    """
    if not is_run(folder):
        raise ConfigError(
            f"{folder} has neither {_METRICS} nor summary.json: it is no run directory; give the "
            "directory that `hpctrain train` wrote"
        )
    lines, num_unreadable = parse_metrics(_text(folder / _METRICS))
    traces = [folder / _TRACE, *sorted(folder.glob(f"*/{_TRACE}"))]
    return Run(
        name=folder.resolve().name,
        lines=tuple(lines),
        num_unreadable=num_unreadable,
        summary=_object(folder / "summary.json"),
        environment=_object(folder / "environment.json"),
        config=_text(folder / "config.toml"),
        folder=str(folder),
        trace=next((found for path in traces if (found := _object(path))), {}),
    )


def is_trace(path: Path) -> bool:
    """Whether a path is a folder that `--trace` recorded into and that was merged."""
    return path.is_dir() and (path / _TRACE).exists()


def read_trace(folder: Path) -> dict[str, Any]:
    """What is known of a timeline; `path` is where it is."""
    found = _object(folder / _TRACE)
    return {**found, "path": str(folder / str(found.get("path", "trace.json.gz")))}


def parse_metrics(text: str) -> tuple[list[dict[str, Any]], int]:
    """Lines of a log with their time in hours, and how many could not be read. Pure.

    The wall clock goes on over restarts, `time_s` begins anew with each: where every line has the
    first, it is taken; else times of the second kind are put one after the other.
    """
    lines: list[dict[str, Any]] = []
    num_unreadable = 0
    for row in text.splitlines():
        try:
            line = json.loads(row)
        except ValueError:  # a run that was killed while it wrote
            num_unreadable += 1
            continue
        if isinstance(line, dict):
            lines.append(line)
    for line, seconds in zip(lines, _seconds(lines), strict=True):
        line["hours"] = seconds / 3600
    return lines, num_unreadable


def _seconds(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    walls = [line.get("wall") for line in lines]
    known = [wall for wall in walls if isinstance(wall, int | float)]
    if lines and len(known) == len(lines):
        return [wall - known[0] for wall in known]
    times: list[float] = []
    before, offset = 0.0, 0.0
    for line in lines:
        given = line.get("time_s")
        now = float(given) if isinstance(given, int | float) else before
        if now < before:  # a restart
            offset += before
        before = now
        times.append(offset + now)
    return times


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
