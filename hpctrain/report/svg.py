"""Charts as SVG: no library, no script, readable without colour, and in words as well."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite

from hpctrain.report.charts import (
    COLOURS,
    DASHES,
    MARKERS,
    Axis,
    Bars,
    Chart,
    Line,
    LineChart,
    make_axis,
    number_text,
)

__all__ = ["HEIGHT", "LEFT", "RIGHT", "WIDTH", "draw", "hatch", "legend", "marker", "text"]

WIDTH = 540
HEIGHT = 340
LEFT = 66
RIGHT = WIDTH - 18
_LETTER = 6.7
"""About the width of a letter in the page's small type."""
_ROW = 20

Entry = tuple[str, int, str]
"""Label, style, and what it stands for: `line`, `ideal`, `mark` or `patch`."""


def text(
    x: float, y: float, words: str, *, anchor: str = "start", kind: str = "", turned: bool = False
) -> str:
    """A piece of text; `turned` reads from the bottom to the top."""
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    named = f' class="{kind}"' if kind else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{turn}>{escape(words)}</text>'
    )


def marker(x: float, y: float, style: int, colour: str, title: str = "") -> str:
    """The sign of a point, different for every style; its title shows under the pointer."""
    shape = MARKERS[style % len(MARKERS)]
    paths = {
        "o": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
        "s": "M-4 -4h8v8h-8z",
        "^": "M0 -5L5 4H-5z",
        "D": "M0 -5.5L5.5 0L0 5.5L-5.5 0z",
        "v": "M0 5L5 -4H-5z",
        "P": "M-1.7 -5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
        "X": "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0z",
    }
    said = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<path d="{paths[shape]}" transform="translate({x:.1f} {y:.1f})" fill="{colour}" '
        f'class="point">{said}</path>'
    )


def legend(entries: Sequence[Entry], key: str = "") -> tuple[list[str], float]:
    """Names and their signs in rows from the top, and where the rows end."""
    out: list[str] = []
    x, y = float(LEFT), 16.0
    for label, style, kind in entries:
        width = 38 + _LETTER * len(label) + 18
        if x + width > RIGHT + 12 and x > LEFT:
            x, y = float(LEFT), y + _ROW
        out.append(_sign(x, y, style, kind, key))
        out.append(text(x + 36, y + 4, label))
        x += width
    return out, (y + 18 if entries else 18)


def _sign(x: float, y: float, style: int, kind: str, key: str) -> str:
    colour = COLOURS[style % len(COLOURS)]
    if kind == "patch":
        return (
            f'<rect x="{x:.1f}" y="{y - 7:.1f}" width="28" height="14" class="bar" '
            f'fill="url(#{escape(key)}-h{style})"/>'
        )
    ends = f'x1="{x:.1f}" x2="{x + 28:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
    if kind == "ideal":
        return f'<line {ends} class="ideal"/>'
    if kind == "mark":
        middle = x + 14
        return (
            f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y - 8:.1f}" y2="{y + 8:.1f}" '
            f'class="mark m{style}"/>'
        )
    dash = " ".join(f"{d:g}" for d in DASHES[style % len(DASHES)])
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    line = f'<line {ends} class="line" stroke="{colour}"{dashed}/>'
    return line + marker(x + 14, y, style, colour)


def hatch(key: str, style: int) -> str:
    """A pattern that fills bars, told apart without colour."""
    colour = COLOURS[style % len(COLOURS)]
    marks = (
        "",
        "M-2 2L2 -2M0 8L8 0M6 10L10 6",
        "M2 2h1.6v1.6h-1.6zM6 6h1.6v1.6h-1.6z",
        "M-2 6L2 10M0 0L8 8M6 -2L10 2",
        "M0 2H8M0 6H8",
        "M0 0L8 8M0 8L8 0",
        "M4 0V8M0 4H8",
    )[style % 7]
    ground = "1" if not marks else "0.22"
    lines = f'<path d="{marks}" stroke="{colour}" stroke-width="1.5" fill="none"/>' if marks else ""
    return (
        f'<pattern id="{escape(key)}-h{style}" width="8" height="8" '
        f'patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="#fff"/>'
        f'<rect width="8" height="8" fill="{colour}" fill-opacity="{ground}"/>{lines}</pattern>'
    )


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
