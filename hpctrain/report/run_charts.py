"""Charts of a run: loss, throughput and evaluation on the time axis, with what happened. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median
from typing import Any

from hpctrain.report.charts import Bars, Chart, Line, LineChart, Mark
from hpctrain.report.points import PARTS
from hpctrain.report.runs import Run

__all__ = ["EVENTS", "event_name", "run_charts", "thin"]

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


def _marks(run: Run, scale: float) -> tuple[Mark, ...]:
    marks = [
        Mark(x=scale * line["hours"], label=name, style=_MARK_STYLES[name])
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
    """At most so many points: x, median, least and most of neighbours that were joined."""
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
    marks: tuple[Mark, ...],
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
