"""Charts as SVG: no library, no script, readable without colour, and in words as well."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite

from hpctrain.report.axes import Axis, make_axis, number_text
from hpctrain.report.charts import COLOURS, DASHES, Bars, Chart, Line, LineChart
from hpctrain.report.shapes import (
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    hatch,
    legend,
    marker,
    text,
)

__all__ = ["draw"]

_BOTTOM = HEIGHT - 50
_FEW = 40
"""Points beyond this number have no markers, and a band for their interval."""
_BESIDE = 5.0


def draw(chart: Chart) -> str:
    """A chart as one `<svg>` element, with a title and a description for those who listen."""
    body = _draw_lines(chart) if isinstance(chart, LineChart) else _draw_bars(chart)
    key = escape(chart.key)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-labelledby="{key}-title {key}-desc" class="chart" id="{key}">\n'
        f'<title id="{key}-title">{escape(chart.title)}</title>\n'
        f'<desc id="{key}-desc">{escape(chart.description)}</desc>\n' + "\n".join(body) + "\n</svg>"
    )


class _Frame:
    """The rectangle that data are drawn in, between its axes."""

    def __init__(self, x: Axis | None, y: Axis, top: float) -> None:
        self.x, self.y, self.top = x, y, top

    def across(self, value: float) -> float:
        """From data to pixels, left to right."""
        place = self.x.place(value) if self.x is not None else value
        return LEFT + place * (RIGHT - LEFT)

    def up(self, value: float) -> float:
        """From data to pixels; what is beyond the frame stays at its edge."""
        return _BOTTOM - min(max(self.y.place(value), 0.0), 1.0) * (_BOTTOM - self.top)

    def axes(self, x_label: str, y_label: str) -> list[str]:
        """Lines, numbers and names of both axes."""
        out = []
        for value, label in self.y.ticks:
            y = self.up(value)
            out.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            out.append(text(LEFT - 8, y + 4, label, anchor="end"))
        if self.x is not None:
            for value, label in self.x.ticks:
                x = self.across(value)
                out.append(
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_BOTTOM}" y2="{_BOTTOM + 5}" '
                    'class="axis"/>'
                )
                out.append(text(x, _BOTTOM + 19, label, anchor="middle"))
        out.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}" class="axis"/>')
        out.append(text((LEFT + RIGHT) / 2, HEIGHT - 10, x_label, anchor="middle", kind="name"))
        middle = (self.top + _BOTTOM) / 2
        out.append(text(16, middle, y_label, anchor="middle", kind="name", turned=True))
        return out


def _draw_lines(chart: LineChart) -> list[str]:
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
    rows, top = legend([*entries, *kinds])
    frame = _Frame(x, y, top)
    out = [*rows, *frame.axes(chart.x_label, chart.y_label)]
    for mark in chart.marks:
        at = frame.across(mark.x)
        out.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{frame.top:.1f}" y2="{_BOTTOM}" '
            f'class="mark m{mark.style}"><title>{escape(mark.label)} at '
            f"{number_text(mark.x)}</title></line>"
        )
    curves = [line for line in chart.lines if not line.is_ideal]
    for line in chart.lines:
        if line.is_ideal:
            out += _curve(line, frame, chart, 0.0)
    for index, line in enumerate(curves):
        # Side by side, or intervals at the same number of ranks would hide each other.
        beside = _BESIDE * (index - (len(curves) - 1) / 2) if chart.x_scale == "log2" else 0.0
        out += _curve(line, frame, chart, beside)
    return out


def _curve(line: Line, frame: _Frame, chart: LineChart, beside: float) -> list[str]:
    points = [
        (frame.across(x) + beside, frame.up(y))
        for x, y in zip(line.x, line.y, strict=True)
        if isfinite(y)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    if line.is_ideal:
        return [f'<polyline points="{path}" class="ideal"/>']
    colour = COLOURS[line.style % len(COLOURS)]
    dash = " ".join(f"{d:g}" for d in DASHES[line.style % len(DASHES)])
    out = _interval(line, frame, colour, beside)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    out.append(f'<polyline points="{path}" class="line" stroke="{colour}"{dashed}/>')
    if line.has_markers and len(points) <= _FEW:
        for index, (x, y) in enumerate(points):
            value = line.y[index]
            said = f"{100 * value:.1f} %" if chart.is_percent else number_text(value)
            name = f"{line.label}: {said} at {number_text(line.x[index])}"
            out.append(marker(x, y, line.style, colour, name))
    return out


def _interval(line: Line, frame: _Frame, colour: str, beside: float) -> list[str]:
    if not line.low:
        return []
    if len(line.x) > _FEW:
        upper = [(frame.across(x), frame.up(v)) for x, v in zip(line.x, line.high, strict=True)]
        lower = [(frame.across(x), frame.up(v)) for x, v in zip(line.x, line.low, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
        return [f'<polygon points="{path}" fill="{colour}" fill-opacity="0.15"/>']
    return [
        _whisker(frame.across(x) + beside, frame.up(low), frame.up(high), colour)
        for x, low, high in zip(line.x, line.low, line.high, strict=True)
    ]


def _whisker(x: float, low: float, high: float, colour: str) -> str:
    return (
        f'<path d="M{x - 4:.1f} {low:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {high:.1f}h8" '
        f'class="whisker" stroke="{colour}"/>'
    )


def _draw_bars(chart: Bars) -> list[str]:
    totals = [sum(values) for values in zip(*(part[1] for part in chart.parts), strict=True)]
    y = make_axis([*totals, *chart.high, 0.0], "linear")
    is_stack = len(chart.parts) > 1
    styles = chart.styles or tuple(range(max(len(chart.parts), len(chart.labels))))
    slot = (RIGHT - LEFT) / max(1, len(chart.labels))
    parts = [name for name, _ in chart.parts] if is_stack else []
    labels = chart.labels
    if not is_stack and not all(_fits(label, slot) for label in labels):
        parts = [f"{number} {label}" for number, label in enumerate(labels, 1)]
        labels = tuple(str(number) for number in range(1, 1 + len(labels)))
    rows, top = legend([(name, styles[i], "patch") for i, name in enumerate(parts)], key=chart.key)
    frame = _Frame(None, y, top + 14)  # a full bar has its number above it
    used = sorted(set(styles))
    out = ["<defs>", *(hatch(chart.key, style) for style in used), "</defs>"]
    out += [*rows, *frame.axes("", chart.y_label)]
    width = min(84.0, slot * 0.66)
    for index, label in enumerate(chart.labels):
        middle = LEFT + (index + 0.5) * slot
        base = 0.0
        for number, (name, values) in enumerate(chart.parts):
            style = styles[number if is_stack else index]
            out += _block(chart, frame, middle, width, base, values[index], (name, label, style))
            base += values[index]
        if chart.high:
            ends = frame.up(chart.low[index]), frame.up(chart.high[index])
            out.append(_whisker(middle, *ends, "#1a1a1a"))
        peak = max(base, chart.high[index] if chart.high else 0.0)
        out.append(text(middle, frame.up(peak) - 6, number_text(base), anchor="middle"))
        out += _bar_label(middle, labels[index], slot)
    return out


def _block(
    chart: Bars,
    frame: _Frame,
    middle: float,
    width: float,
    base: float,
    value: float,
    names: tuple[str, str, int],
) -> list[str]:
    part, bar, style = names
    if value <= 0:
        return []
    top, bottom = frame.up(base + value), frame.up(base)
    return [
        f'<rect x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{bottom - top:.1f}" fill="url(#{escape(chart.key)}-h{style})" class="bar">'
        f"<title>{escape(bar)}, {escape(part)}: {number_text(value)}</title></rect>"
    ]


def _bar_label(middle: float, label: str, slot: float) -> list[str]:
    """A name under its bar, cut into lines where it is long."""
    return [
        text(middle, _BOTTOM + 17 + 14 * row, line, anchor="middle")
        for row, line in enumerate(_wrap(label, _room(slot))[:3])
    ]


def _room(slot: float) -> int:
    """Letters that a bar's name has in a line."""
    return max(4, int(slot / 6.6))


def _fits(label: str, slot: float) -> bool:
    """Whether a bar's name can be read under it; otherwise bars have numbers, and a legend."""
    lines = _wrap(label, _room(slot))
    return len(lines) <= 3 and "…" not in "".join(lines)


def _wrap(label: str, room: int) -> Sequence[str]:
    lines: list[str] = []
    for word in label.split():
        if lines and len(lines[-1]) + 1 + len(word) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [line if len(line) <= room + 2 else f"{line[:room]}…" for line in lines]
