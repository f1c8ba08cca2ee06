"""Run directories and traces: read, drawn, and as sections of a report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.log import format_hours
from hpctrain.report.charts import Bars, Chart, EventMark, Line, LineChart, number_text
from hpctrain.report.document import ReportSection, ReportTable
from hpctrain.report.results import PARTS
from hpctrain.timeline import blame

__all__ = [
    "EVENTS",
    "Run",
    "event_name",
    "is_run",
    "is_trace",
    "parse_metrics",
    "read_run",
    "read_trace",
    "run_charts",
    "run_figures",
    "run_sections",
    "thin",
    "trace_words",
]

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
    """Its timeline, if one was recorded."""
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
            f"{folder} has neither {_METRICS} nor summary.json: it is not a run directory; give "
            "the "
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

    The wall clock continues over restarts, `time_s` restarts with each: if every line has the
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


_MOST_POINTS = 300
_MOST_MARKS = 60
EVENTS = {
    "saved": "checkpoint",
    "checkpoint": "checkpoint",
    "restored": "restart",
    "restart": "restart",
    "resumed": "restart",
    "stopping": "stopped",
}
_MARK_STYLES = {"checkpoint": 0, "restart": 1, "stopped": 2}
_OWN = frozenset(
    ("kind", "step", "epoch", "time_s", "wall", "seq", "hours", "samples", "num_samples", "seconds")
)

Values = list[tuple[float, float]]


def run_charts(run: Run, key: str) -> list[Chart]:
    """All charts that a run has the numbers for."""
    scale, unit = _time_unit(run)
    marks = _marks(run, scale)
    found: list[Chart] = []
    steps = run.of_kind("step")
    loss = _values(steps, "loss", scale)
    if loss:
        tests = _values(run.of_kind("eval"), "loss", scale)
        lines = [_thinned("training loss", loss, 0)]
        if tests:
            lines.append(_thinned("evaluation loss", tests, 1))
        found.append(_chart(key, "loss", "loss", lines, unit, marks, "free"))
    speed = _values(steps, "samples_per_s", scale)
    if speed:
        lines = [_thinned("samples a second", speed, 2)]
        found.append(_chart(key, "throughput", "samples/s", lines, unit, marks, "linear"))
    names = _names(run.of_kind("eval")) - {"loss"}
    shown = {name: _values(run.of_kind("eval"), name, scale) for name in sorted(names)}
    lines = [
        _thinned(name, values, style)
        for style, (name, values) in enumerate(shown.items())
        if values and max(abs(v) for _, v in values) <= 100
    ]
    if lines:
        found.append(_chart(key, "evaluation", "evaluation", lines[:6], unit, marks, "free"))
    split = _split(steps, key)
    return [*found, split] if split else found


def event_name(line: Mapping[str, Any]) -> str:
    """What happened, in the report's words."""
    said = line.get("event") or line.get("name") or line.get("what") or ""
    return EVENTS.get(str(said), str(said))


def _time_unit(run: Run) -> tuple[float, str]:
    longest = max((line["hours"] for line in run.lines), default=0.0)
    if longest < 0.05:
        return 3600.0, "seconds since the start"
    return (60.0, "minutes since the start") if longest < 3 else (1.0, "hours since the start")


def _marks(run: Run, scale: float) -> tuple[EventMark, ...]:
    marks = [
        EventMark(x=scale * line["hours"], label=name, style=_MARK_STYLES[name])
        for line in run.of_kind("event")
        if (name := event_name(line)) in _MARK_STYLES
    ]
    saves = [mark for mark in marks if mark.label == "checkpoint"]
    if len(saves) > _MOST_MARKS:  # hundreds of checkpoints would hide the curve
        every = -(-len(saves) // _MOST_MARKS)
        dropped = {id(mark) for i, mark in enumerate(saves) if i % every}
        marks = [mark for mark in marks if id(mark) not in dropped]
    return tuple(marks)


def _values(lines: Sequence[Mapping[str, Any]], name: str, scale: float) -> Values:
    return [
        (scale * line["hours"], float(line[name]))
        for line in lines
        if isinstance(line.get(name), int | float) and isfinite(line[name])
    ]


def _names(lines: Sequence[Mapping[str, Any]]) -> set[str]:
    return {
        name
        for line in lines
        for name, value in line.items()
        if name not in _OWN and isinstance(value, int | float) and not isinstance(value, bool)
    }


def thin(values: Values, most: int = _MOST_POINTS) -> list[tuple[float, float, float, float]]:
    """At most this many points: x, median, least and most of adjacent points that were merged."""
    size = -(-len(values) // most)
    if size <= 1:
        return [(x, y, y, y) for x, y in values]
    pieces = [values[i : i + size] for i in range(0, len(values), size)]
    return [
        (
            median(x for x, _ in piece),
            median(y for _, y in piece),
            min(y for _, y in piece),
            max(y for _, y in piece),
        )
        for piece in pieces
    ]


def _thinned(label: str, values: Values, style: int) -> Line:
    points = thin(values)
    joined = len(points) < len(values)
    return Line(
        label=label,
        x=tuple(p[0] for p in points),
        y=tuple(p[1] for p in points),
        low=tuple(p[2] for p in points) if joined else (),
        high=tuple(p[3] for p in points) if joined else (),
        style=style,
    )


def _chart(
    key: str,
    what: str,
    y_label: str,
    lines: Sequence[Line],
    unit: str,
    marks: tuple[EventMark, ...],
    y_scale: str,
) -> LineChart:
    told = [f"{line.label} from {line.y[0]:.4g} to {line.y[-1]:.4g}" for line in lines]
    happened = {label: sum(m.label == label for m in marks) for label in _MARK_STYLES}
    events = ", ".join(f"{label}: {n}" for label, n in happened.items() if n)
    return LineChart(
        key=f"{key}-{what}",
        title=f"{what.capitalize()} over time",
        description=f"{'; '.join(told)}. {events}".strip(),
        x_label=unit,
        y_label=y_label,
        lines=tuple(lines),
        y_scale=y_scale,
        marks=marks,
    )


def _split(steps: Sequence[Mapping[str, Any]], key: str) -> Bars | None:
    """Median milliseconds of a step's parts, over tenths of the run."""
    timed = [s for s in steps if any(isinstance(s.get(f"{p}_s"), int | float) for p in PARTS)]
    if not timed:
        return None
    size = -(-len(timed) // 10)
    pieces = [timed[i : i + size] for i in range(0, len(timed), size)]
    named = [p for p in PARTS if any(s.get(f"{p}_s") for s in timed)]
    parts = tuple(
        (
            part,
            tuple(
                1000 * median(float(s.get(f"{part}_s") or 0.0) for s in piece) for piece in pieces
            ),
        )
        for part in named
    )
    return Bars(
        key=f"{key}-breakdown",
        title="Where a step's time goes, through the run",
        description="Stacked median milliseconds of a step, from the beginning to the end. "
        + "; ".join(f"{name}: {', '.join(f'{v:.2f}' for v in values)}" for name, values in parts),
        y_label="ms a step",
        labels=tuple(f"step {piece[0].get('step', '?')}" for piece in pieces),
        parts=parts,
        styles=tuple(PARTS.index(part) for part in named),
    )


_MOST_EVENTS = 200
_BEHIND = 1.05
"""A slowest rank below this factor is within normal variation."""


def run_sections(run: Run, key: str) -> list[ReportSection]:
    """Curves and what happened, then the events one by one."""
    charts = run_charts(run, key)
    words = [_outcome(run), *_speed(run), *_slowest(run)]
    if run.num_unreadable:
        words.append(f"Not readable in metrics.jsonl: {_count(run.num_unreadable, 'line')}.")
    if not run.of_kind("step"):
        words.append("It logged no steps: there are no curves.")
    elif not any(chart.key.endswith("breakdown") for chart in charts):
        words.append("The parts of a step were not timed in this run: there is no breakdown.")
    sections = [
        ReportSection(title=f"Run {run.name}", paragraphs=tuple(words), charts=tuple(charts))
    ]
    events = run.of_kind("event")
    if events:
        rows = tuple(
            (format_hours(line["hours"]), str(line.get("step", "")), event_name(line), _rest(line))
            for line in events[:_MOST_EVENTS]
        )
        table = ReportTable(
            key=f"{key}-events",
            title=f"{run.name}: what happened",
            headers=("time", "step", "event", "more"),
            rows=rows,
        )
        more = len(events) - len(rows)
        said = (f"{more} later events are left out.",) if more > 0 else ()
        sections.append(
            ReportSection(
                title=f"{run.name}: events", paragraphs=said, tables=(table,), is_minor=True
            )
        )
    if run.config:
        lines = tuple(run.config.strip().splitlines())
        table = ReportTable(
            key=f"{key}-config",
            title=f"{run.name}: config.toml",
            headers=("config.toml",),
            rows=tuple((line,) for line in lines),
        )
        sections.append(
            ReportSection(title=f"{run.name}: configuration", tables=(table,), is_minor=True)
        )
    return sections


def run_figures(run: Run) -> list[tuple[str, str]]:
    """The key numbers."""
    found = []
    summary = run.summary
    if isinstance(summary.get("samples_per_s"), int | float):
        where = " in the last job" * _was_resumed(run)
        rate = number_text(summary["samples_per_s"])
        found.append((rate, f"{run.name}: samples a second{where}"))
    if isinstance(summary.get("seconds"), int | float):
        what = "training time" if _covers_all_jobs(run) else "time of the last job"
        found.append((format_hours(summary["seconds"] / 3600), f"{run.name}: {what}"))
    metrics = summary.get("metrics")
    for name, value in (metrics if isinstance(metrics, Mapping) else {}).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found.append((number_text(value), f"{run.name}: {name}"))
    return found[:4]


def _covers_all_jobs(run: Run) -> bool:
    """Whether the summary's time is that of its steps: older ones have that of the last job."""
    return "job_seconds" in run.summary or not _was_resumed(run)


def _was_resumed(run: Run) -> bool:
    return any(event_name(line) == "restart" for line in run.of_kind("event"))


def _outcome(run: Run) -> str:
    summary = run.summary
    if not summary:
        return "There is no summary.json: the run has not ended, or was killed."
    parts = [f"The run {summary.get('state', 'ended')}"]
    if summary.get("steps"):
        parts.append(f"after {summary['steps']} steps")
    if summary.get("ranks"):
        parts.append(f"on {summary['ranks']} ranks")
    if summary.get("engine"):
        parts.append(f"with the {summary['engine']} engine")
    counts = Counter(event_name(line) for line in run.of_kind("event"))
    told = [_count(counts[name], name) for name in ("restart", "checkpoint") if counts[name]]
    return " ".join(parts) + (f"; {' and '.join(told)}." if told else ".")


def _speed(run: Run) -> list[str]:
    times = [line["step_s"] for line in run.of_kind("step") if _is_number(line.get("step_s"))]
    if len(times) < 2:
        return []
    slow = sum(t > 2 * median(times) for t in times)
    text = f"A step took {1000 * median(times):.3g} ms (median)"
    if slow:
        text += f"; {slow} of {len(times)} logged steps took more than twice as long"
    return [f"{text}."]


def _slowest(run: Run) -> list[str]:
    said = []
    ranks = [
        int(line["slowest_rank"]) for line in run.lines if _is_number(line.get("slowest_rank"))
    ]
    if ranks:
        rank, count = Counter(ranks).most_common(1)[0]
        share = count / len(ranks)
        text = f"Rank {rank} was the slowest in {100 * share:.0f} % of the steps that record it"
        behind = [
            float(line["slowest_ratio"])
            for line in run.lines
            if _is_number(line.get("slowest_ratio"))
        ]
        if behind:
            text += f", {100 * (median(behind) - 1):.0f} % behind (median of the slowest ranks)"
        if share > 0.5 and len(ranks) >= 10 and (not behind or median(behind) > _BEHIND):
            text += "; look at its node with `hpctrain doctor --all-nodes`"
        said.append(f"{text}.")
    return said + ([trace_words(run.trace)] if run.trace else [])


def trace_words(trace: Mapping[str, Any]) -> str:
    """What a timeline shows, and where to look in it."""
    slowest = trace.get("slowest")
    text = (
        f"{trace.get('path', 'trace.json.gz')} has {trace.get('num_events', 0)} events of "
        f"{trace.get('num_ranks', 0)} ranks; clocks are within {trace.get('error_us', 0.0):.1f} us."
    )
    if not isinstance(slowest, Mapping):
        return f"{text} It has too few steps to name a slowest one."
    phase, extra_s = str(slowest.get("phase", "")), float(slowest.get("extra_s", 0.0))
    why = blame(slowest["rank"], phase, extra_s)
    return (
        f"{text} Its slowest step is number {slowest['step']}: {1000 * slowest['seconds']:.1f} ms "
        f"against a median of {1000 * slowest['median_s']:.1f}; {why}. "
        f'Open the file at ui.perfetto.dev and search for "step {slowest["step"]}".'
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rest(line: Mapping[str, Any]) -> str:
    hidden = {"kind", "event", "name", "what", "step", "epoch", "time_s", "wall", "seq", "hours"}
    return ", ".join(f"{k}={v}" for k, v in line.items() if k not in hidden)
