"""Charts as files: SVG, and PNG and PDF painted by matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import ConfigError
from hpctrain.report.charts import COLOURS, DASHES, HATCHES, MARKERS, Chart
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
from hpctrain.report.svg import render_svg_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_chart", "write_pdf", "write_pngs"]

_PER_INCH = 75
_TITLE = 30
"""Height of the title; a page has it in the caption instead."""
_DPI = 160
_LETTER_POINTS = 8.5
_ALIGNED = {"start": "left", "middle": "center", "end": "right"}
_GREY, _DARK = "#6a737d", "#24292f"
_PENS: dict[str, dict[str, Any]] = {
    "grid": {"color": "#e6eaee", "lw": 0.8},
    "axis": {"color": _GREY, "lw": 0.8},
    "ideal": {"color": _GREY, "lw": 1.2, "linestyle": (0, (4, 4))},
}
_MARK_PENS: tuple[dict[str, Any], ...] = (
    {"color": "#57606a", "lw": 0.9, "linestyle": (0, (2, 4))},
    {"color": "#c44601", "lw": 1.6, "linestyle": (0, (5, 2))},
    {"color": "#1c2128", "lw": 1.6},
)


def write_chart(chart: Chart, path: Path) -> None:
    """One chart as a file: SVG by its name's ending, else what matplotlib writes.

    Raises:
        ConfigError: matplotlib is needed and not installed.
    """
    if path.suffix == ".svg":
        path.write_text(render_svg_file(chart), encoding="utf-8")
    else:
        _paint_figure(chart).savefig(path, dpi=_DPI)


def write_pngs(charts: Sequence[Chart], folder: Path) -> dict[str, str]:
    """One PNG for every chart; their names by the chart's key."""
    names = {}
    for chart in charts:
        names[chart.key] = f"{chart.key}.png"
        _paint_figure(chart).savefig(folder / names[chart.key], dpi=_DPI)
    return names


def write_pdf(charts: Sequence[Chart], path: Path) -> None:
    """All charts in one PDF, one on a page."""
    _require_matplotlib()
    from matplotlib.backends.backend_pdf import PdfPages

    with PdfPages(path) as pages:
        for chart in charts:
            pages.savefig(_paint_figure(chart))


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "PNG and PDF are drawn by matplotlib, which is not installed; install it with `pip "
            "install 'hpctrain[plot]'`, or use --format html,csv,md,tex"
        ) from error


def _paint_figure(chart: Chart) -> Figure:
    """A figure without pyplot: no display, and nothing global is left behind."""
    _require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / _PER_INCH, (HEIGHT + _TITLE) / _PER_INCH))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, -_TITLE))
    axes.set_axis_off()
    axes.text(WIDTH / 2, -_TITLE / 2 + 6, chart.title, fontsize=11, ha="center", va="baseline")
    for layer, shape in enumerate(draw(chart)):
        _paint(axes, shape, layer)
    return figure


def _paint(axes: Any, shape: Shape, layer: int) -> None:
    """One shape; later ones above, whatever they are."""
    match shape:
        case Segment(start=(x1, y1), stop=(x2, y2), kind=kind, style=style):
            axes.plot([x1, x2], [y1, y2], zorder=layer, **_pen(kind, style))
        case Curve(points=points, kind=kind, style=style):
            xs, ys = zip(*points, strict=True) if points else ((), ())
            axes.plot(xs, ys, zorder=layer, **_pen(kind, style))
        case Band(points=points, style=style):
            xs, ys = zip(*points, strict=True)
            axes.fill(xs, ys, color=_colour(style), alpha=0.15, lw=0, zorder=layer)
        case Whisker(x=x, low=low, high=high, colour=colour):
            ends = ((x - 4, x + 4, low, low), (x, x, low, high), (x - 4, x + 4, high, high))
            for x1, x2, y1, y2 in ends:
                axes.plot([x1, x2], [y1, y2], color=colour, lw=1.0, zorder=layer)
        case Marker(x=x, y=y, style=style):
            sign = {"marker": MARKERS[style % len(MARKERS)], "ms": 6.5, "mec": "white", "mew": 0.8}
            axes.plot([x], [y], color=_colour(style), zorder=layer, **sign)
        case Box(x=x, y=y, width=width, height=height, style=style):
            axes.bar(
                x + width / 2,
                height,
                width,
                bottom=y,
                color=_light(style),
                edgecolor=_DARK,
                linewidth=0.6,
                hatch=HATCHES[style % len(HATCHES)],
                zorder=layer,
            )
        case Text(x=x, y=y, words=words, anchor=anchor):
            turned = {"rotation": 90, "rotation_mode": "anchor"} if shape.is_turned else {}
            axes.text(
                x,
                y,
                words,
                ha=_ALIGNED[anchor],
                va="baseline",
                fontsize=_LETTER_POINTS + shape.is_name,
                color=_GREY if shape.is_name else "#333333",
                zorder=layer,
                parse_math=False,
                **turned,
            )


def _pen(kind: str, style: int) -> dict[str, Any]:
    if kind == "mark":
        return _MARK_PENS[style % len(_MARK_PENS)]
    if kind != "line":
        return _PENS[kind]
    dash = DASHES[style % len(DASHES)]
    return {
        "color": _colour(style),
        "lw": 1.8,
        "linestyle": (0, tuple(d / 2 for d in dash)) if dash else "-",
    }


def _colour(style: int) -> str:
    return COLOURS[style % len(COLOURS)]


def _light(style: int) -> str:
    """The ground of a hatched bar: full where there is no hatch."""
    colour = _colour(style)
    if not HATCHES[style % len(HATCHES)]:
        return colour
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - 0.35 * (255 - part)):02x}" for part in parts)
