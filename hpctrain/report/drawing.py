"""A chart as shapes on a sheet: where everything goes, whatever puts it on paper. Pure.

This is the only place that lays out axes, legends, curves and bars; `svg` and `pictures` write each
shape in their own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from hpctrain.report.charts import (
    COLOURS,
    Axis,
    Bars,
    Chart,
    Line,
    LineChart,
    make_axis,
    number_text,
)

__all__ = [
    "HEIGHT",
    "WIDTH",
    "Band",
    "Box",
    "Curve",
    "Marker",
    "Segment",
    "Shape",
    "Text",
    "Whisker",
    "draw",
]

WIDTH = 540
HEIGHT = 340
_LEFT = 66
_RIGHT = WIDTH - 18
_BOTTOM = HEIGHT - 50
_LETTER = 6.7
"""About the width of a letter in the page's small type."""
_ROW = 20
_FEW = 40
"""Points beyond this number have no markers, and a band for their interval."""
_BESIDE = 5.0
_INK = "#1a1a1a"
_Entry = tuple[str, int, str]
"""Label, style, and what it stands for: `line`, `ideal`, `mark` or `patch`."""
_Spot = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A straight line."""

    start: _Spot
    stop: _Spot
    kind: str
    """`grid`, `axis`, `ideal`, `line` or `mark`."""
    style: int = 0
    title: str = ""
    """What shows under the pointer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A line through points."""

    points: tuple[_Spot, ...]
    kind: str
    """`line` or `ideal`."""
    style: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The area between two curves: an interval."""

    points: tuple[_Spot, ...]
    style: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Whisker:
    """The interval of one value."""

    x: float
    low: float
    high: float
    colour: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """The sign of a point, different for every style."""

    x: float
    y: float
    style: int
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A bar, or its sign in a legend; hatched by its style."""

    x: float
    y: float
    width: float
    height: float
    style: int
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A piece of text."""

    x: float
    y: float
    words: str
    anchor: str = "start"
    """`start`, `middle` or `end`."""
    is_name: bool = False
    """Whether it is the name of an axis."""
    is_turned: bool = False
    """Whether it reads from the bottom to the top."""


Shape = Segment | Curve | Band | Whisker | Marker | Box | Text


def draw(chart: Chart) -> list[Shape]:
    """All shapes of a chart, those below first."""
    return _draw_lines(chart) if isinstance(chart, LineChart) else _draw_bars(chart)


def _draw_legend(entries: Sequence[_Entry]) -> tuple[list[Shape], float]:
    """Names and their signs in rows from the top, and where the rows end."""
    out: list[Shape] = []
    x, y = float(_LEFT), 16.0
    for label, style, kind in entries:
        width = 38 + _LETTER * len(label) + 18
        if x + width > _RIGHT + 12 and x > _LEFT:
            x, y = float(_LEFT), y + _ROW
        out += _draw_sign(x, y, style, kind)
        out.append(Text(x=x + 36, y=y + 4, words=label))
        x += width
    return out, (y + 18 if entries else 18)


def _draw_sign(x: float, y: float, style: int, kind: str) -> list[Shape]:
    if kind == "patch":
        return [Box(x=x, y=y - 7, width=28, height=14, style=style)]
    if kind == "mark":
        return [Segment(start=(x + 14, y - 8), stop=(x + 14, y + 8), kind="mark", style=style)]
    sign: list[Shape] = [Segment(start=(x, y), stop=(x + 28, y), kind=kind, style=style)]
    return sign if kind == "ideal" else [*sign, Marker(x=x + 14, y=y, style=style)]


class _Frame:
    """The rectangle that data are drawn in, between its axes."""

    def __init__(self, x: Axis | None, y: Axis, top: float) -> None:
        self.x, self.y, self.top = x, y, top

    def across(self, value: float) -> float:
        """From data to the sheet, left to right."""
        place = self.x.place(value) if self.x is not None else value
        return _LEFT + place * (_RIGHT - _LEFT)

    def up(self, value: float) -> float:
        """From data to the sheet; what is beyond the frame stays at its edge."""
        return _BOTTOM - min(max(self.y.place(value), 0.0), 1.0) * (_BOTTOM - self.top)

    def axes(self, x_label: str, y_label: str) -> list[Shape]:
        """Lines, numbers and names of both axes."""
        out: list[Shape] = []
        for value, label in self.y.ticks:
            y = self.up(value)
            out.append(Segment(start=(_LEFT, y), stop=(_RIGHT, y), kind="grid"))
            out.append(Text(x=_LEFT - 8, y=y + 4, words=label, anchor="end"))
        if self.x is not None:
            for value, label in self.x.ticks:
                x = self.across(value)
                out.append(Segment(start=(x, _BOTTOM), stop=(x, _BOTTOM + 5), kind="axis"))
                out.append(Text(x=x, y=_BOTTOM + 19, words=label, anchor="middle"))
        out.append(Segment(start=(_LEFT, _BOTTOM), stop=(_RIGHT, _BOTTOM), kind="axis"))
        middle = (_LEFT + _RIGHT) / 2
        out.append(Text(x=middle, y=HEIGHT - 10, words=x_label, anchor="middle", is_name=True))
        middle = (self.top + _BOTTOM) / 2
        out.append(
            Text(x=16, y=middle, words=y_label, anchor="middle", is_name=True, is_turned=True)
        )
        return out


def _draw_lines(chart: LineChart) -> list[Shape]:
    x = make_axis([v for line in chart.lines for v in line.x], chart.x_scale, from_zero=False)
    heights = [v for line in chart.lines for v in (*line.y, *line.low, *line.high)]
    y = make_axis(
        heights,
        chart.y_scale if chart.y_scale.startswith("log") else "linear",
        is_percent=chart.is_percent,
        from_zero=chart.y_scale != "free",
    )
    entries = [
        (line.label, line.style, "ideal" if line.is_ideal else "line") for line in chart.lines
    ]
    kinds = dict.fromkeys((mark.label, mark.style, "mark") for mark in chart.marks)
    rows, top = _draw_legend([*entries, *kinds])
    frame = _Frame(x, y, top)
    out = [*rows, *frame.axes(chart.x_label, chart.y_label)]
    for mark in chart.marks:
        at = frame.across(mark.x)
        said = f"{mark.label} at {number_text(mark.x)}"
        ends = {"start": (at, frame.top), "stop": (at, float(_BOTTOM))}
        out.append(Segment(**ends, kind="mark", style=mark.style, title=said))
    curves = [line for line in chart.lines if not line.is_ideal]
    for line in chart.lines:
        if line.is_ideal:
            out += _draw_curve(line, frame, chart, 0.0)
    for index, line in enumerate(curves):
        # Side by side, or intervals at the same number of ranks would hide each other.
        beside = _BESIDE * (index - (len(curves) - 1) / 2) if chart.x_scale == "log2" else 0.0
        out += _draw_curve(line, frame, chart, beside)
    return out


def _draw_curve(line: Line, frame: _Frame, chart: LineChart, beside: float) -> list[Shape]:
    known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if isfinite(y)]
    points = tuple((frame.across(x) + beside, frame.up(y)) for x, y in known)
    if line.is_ideal:
        return [Curve(points=points, kind="ideal")]
    out = _draw_interval(line, frame, beside)
    out.append(Curve(points=points, kind="line", style=line.style))
    if line.has_markers and len(points) <= _FEW:
        for (x, y), (place, value) in zip(points, known, strict=True):
            said = f"{100 * value:.1f} %" if chart.is_percent else number_text(value)
            title = f"{line.label}: {said} at {number_text(place)}"
            out.append(Marker(x=x, y=y, style=line.style, title=title))
    return out


def _draw_interval(line: Line, frame: _Frame, beside: float) -> list[Shape]:
    if not line.low:
        return []
    if len(line.x) > _FEW:
        upper = [(frame.across(x), frame.up(v)) for x, v in zip(line.x, line.high, strict=True)]
        lower = [(frame.across(x), frame.up(v)) for x, v in zip(line.x, line.low, strict=True)]
        return [Band(points=(*upper, *reversed(lower)), style=line.style)]
    colour = COLOURS[line.style % len(COLOURS)]
    return [
        Whisker(x=frame.across(x) + beside, low=frame.up(low), high=frame.up(high), colour=colour)
        for x, low, high in zip(line.x, line.low, line.high, strict=True)
    ]


def _draw_bars(chart: Bars) -> list[Shape]:
    totals = [sum(values) for values in zip(*(part[1] for part in chart.parts), strict=True)]
    y = make_axis([*totals, *chart.high, 0.0], "linear")
    is_stack = len(chart.parts) > 1
    styles = chart.styles or tuple(range(max(len(chart.parts), len(chart.labels))))
    slot = (_RIGHT - _LEFT) / max(1, len(chart.labels))
    parts = [name for name, _ in chart.parts] if is_stack else []
    labels = chart.labels
    if not is_stack and not all(_fits(label, slot) for label in labels):
        parts = [f"{number} {label}" for number, label in enumerate(labels, 1)]
        labels = tuple(str(number) for number in range(1, 1 + len(labels)))
    rows, top = _draw_legend([(name, styles[i], "patch") for i, name in enumerate(parts)])
    frame = _Frame(None, y, top + 14)  # a full bar has its number above it
    out = [*rows, *frame.axes("", chart.y_label)]
    width = min(84.0, slot * 0.66)
    for index, label in enumerate(chart.labels):
        middle = _LEFT + (index + 0.5) * slot
        base = 0.0
        for number, (name, values) in enumerate(chart.parts):
            value = values[index]
            if value > 0:
                above, below = frame.up(base + value), frame.up(base)
                out.append(
                    Box(
                        x=middle - width / 2,
                        y=above,
                        width=width,
                        height=below - above,
                        style=styles[number if is_stack else index],
                        title=f"{label}, {name}: {number_text(value)}",
                    )
                )
            base += value
        if chart.high:
            low, high = frame.up(chart.low[index]), frame.up(chart.high[index])
            out.append(Whisker(x=middle, low=low, high=high, colour=_INK))
        peak = max(base, chart.high[index] if chart.high else 0.0)
        out.append(Text(x=middle, y=frame.up(peak) - 6, words=number_text(base), anchor="middle"))
        out += _draw_bar_label(middle, labels[index], slot)
    return out


def _draw_bar_label(middle: float, label: str, slot: float) -> list[Shape]:
    """A name under its bar, cut into lines where it is long."""
    return [
        Text(x=middle, y=_BOTTOM + 17 + 14 * row, words=line, anchor="middle")
        for row, line in enumerate(_wrap(label, _letters(slot))[:3])
    ]


def _letters(slot: float) -> int:
    """Letters that a bar's name has in a line."""
    return max(4, int(slot / 6.6))


def _fits(label: str, slot: float) -> bool:
    """Whether a bar's name can be read under it; otherwise bars have numbers, and a legend."""
    lines = _wrap(label, _letters(slot))
    return len(lines) <= 3 and "…" not in "".join(lines)


def _wrap(label: str, most: int) -> Sequence[str]:
    lines: list[str] = []
    for word in label.split():
        if lines and len(lines[-1]) + 1 + len(word) <= most:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [line if len(line) <= most + 2 else f"{line[:most]}…" for line in lines]
