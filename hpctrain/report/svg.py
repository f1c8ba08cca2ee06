"""Charts as SVG: no library, no script, readable without colour, and in words as well. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from hpctrain.report.charts import COLOURS, DASHES, MARKERS, Chart
from hpctrain.report.drawing import (
    HEIGHT,
    WIDTH,
    Band,
    Box,
    Curve,
    Marker,
    Segment,
    Shape,
    Text,
    Whisker,
    draw,
)

__all__ = ["CHART_STYLE", "render_svg", "render_svg_file"]

CHART_STYLE = """svg.chart { display: block; width: 100%; height: auto;
  font: 12px system-ui, -apple-system,
  "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
svg text { fill: #333; font-variant-numeric: tabular-nums; }
svg text.name { fill: #57606a; font-size: 13px; }
svg .grid { stroke: #e6eaee; }
svg .axis { stroke: #6a737d; }
svg .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
svg .ideal { fill: none; stroke: #6a737d; stroke-width: 1.6; stroke-dasharray: 5 5; }
svg .whisker { fill: none; stroke-width: 1.3; }
svg .point { stroke: #fff; stroke-width: 1; }
svg .bar { stroke: #24292f; stroke-width: 0.8; }
svg .mark { stroke: #57606a; stroke-width: 1.1; }
svg .m0 { stroke-dasharray: 2 4; }
svg .m1 { stroke: #c44601; stroke-width: 2; stroke-dasharray: 8 3; }
svg .m2 { stroke: #1c2128; stroke-width: 2; }
"""
"""What the classes of shapes look like, for the page that charts are in."""

_MARKERS = {
    "o": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "s": "M-4 -4h8v8h-8z",
    "^": "M0 -5L5 4H-5z",
    "D": "M0 -5.5L5.5 0L0 5.5L-5.5 0z",
    "v": "M0 5L5 -4H-5z",
    "P": "M-1.7 -5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
    "X": "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0z",
}
_HATCHES = (
    "",
    "M-2 2L2 -2M0 8L8 0M6 10L10 6",
    "M2 2h1.6v1.6h-1.6zM6 6h1.6v1.6h-1.6z",
    "M-2 6L2 10M0 0L8 8M6 -2L10 2",
    "M0 2H8M0 6H8",
    "M0 0L8 8M0 8L8 0",
    "M4 0V8M0 4H8",
)


def render_svg_file(chart: Chart) -> str:
    """A chart as a file of its own, which brings its style."""
    head, tag, tail = render_svg(chart).partition("</desc>\n")
    return f"{head}{tag}<style>{CHART_STYLE}</style>\n{tail}\n"


def render_svg(chart: Chart) -> str:
    """A chart as one `<svg>` element, with a title and a description for those who listen."""
    shapes = draw(chart)
    key = escape(chart.key)
    styles = sorted({shape.style for shape in shapes if isinstance(shape, Box)})
    hatches = ["<defs>", *(_hatch(key, style) for style in styles), "</defs>"] if styles else []
    body = [*hatches, *(_write(shape, key) for shape in shapes)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-labelledby="{key}-title {key}-desc" class="chart" id="{key}">\n'
        f'<title id="{key}-title">{escape(chart.title)}</title>\n'
        f'<desc id="{key}-desc">{escape(chart.description)}</desc>\n' + "\n".join(body) + "\n</svg>"
    )


def _write(shape: Shape, key: str) -> str:
    """One shape; styles of the page are classes."""
    match shape:
        case Segment(start=(x1, y1), stop=(x2, y2), kind=kind, style=style):
            stroke = _stroke(style) if kind == "line" else ""
            named = f"mark m{style}" if kind == "mark" else kind
            return (
                f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" class="{named}"'
                f"{stroke}{_end('line', shape.title)}"
            )
        case Curve(points=points, kind=kind, style=style):
            stroke = _stroke(style) if kind == "line" else ""
            return f'<polyline points="{_path(points)}" class="{kind}"{stroke}/>'
        case Band(points=points, style=style):
            return (
                f'<polygon points="{_path(points)}" fill="{_colour(style)}" fill-opacity="0.15"/>'
            )
        case Whisker(x=x, low=low, high=high, colour=colour):
            path = f"M{x - 4:.1f} {low:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {high:.1f}h8"
            return f'<path d="{path}" class="whisker" stroke="{colour}"/>'
        case Marker(x=x, y=y, style=style, title=title):
            path = _MARKERS[MARKERS[style % len(MARKERS)]]
            return (
                f'<path d="{path}" transform="translate({x:.1f} {y:.1f})" fill="{_colour(style)}" '
                f'class="point"{_end("path", title)}'
            )
        case Box(x=x, y=y, width=width, height=height, style=style, title=title):
            return (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="url(#{key}-h{style})" class="bar"{_end("rect", title)}'
            )
        case Text(x=x, y=y, words=words, anchor=anchor):
            turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if shape.is_turned else ""
            named = ' class="name"' if shape.is_name else ""
            return (
                f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{turn}>'
                f"{escape(words)}</text>"
            )


def _end(tag: str, title: str) -> str:
    """The end of an element; its title shows under the pointer."""
    return f"><title>{escape(title)}</title></{tag}>" if title else "/>"


def _path(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _colour(style: int) -> str:
    return COLOURS[style % len(COLOURS)]


def _stroke(style: int) -> str:
    dash = " ".join(f"{d:g}" for d in DASHES[style % len(DASHES)])
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f' stroke="{_colour(style)}"{dashed}'


def _hatch(key: str, style: int) -> str:
    """A pattern that fills bars, told apart without colour."""
    colour, marks = _colour(style), _HATCHES[style % len(_HATCHES)]
    ground = "1" if not marks else "0.22"
    lines = f'<path d="{marks}" stroke="{colour}" stroke-width="1.5" fill="none"/>' if marks else ""
    return (
        f'<pattern id="{key}-h{style}" width="8" height="8" '
        f'patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="#fff"/>'
        f'<rect width="8" height="8" fill="{colour}" fill-opacity="{ground}"/>{lines}</pattern>'
    )
