"""Charts as PNG and PDF, by matplotlib: the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import ConfigError
from hpctrain.report.charts import (
    COLOURS,
    DASHES,
    HATCHES,
    MARKERS,
    Axis,
    Bars,
    Chart,
    LineChart,
    make_axis,
    number_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_pdf", "write_pngs"]

_SIZE = (7.2, 4.0)
_LETTERS_IN_A_ROW = 80
"""Of all bars' names together, before they are written aslant."""
_FEW = 40


def write_pngs(charts: Sequence[Chart], folder: Path) -> dict[str, str]:
    """One PNG for every chart; their names by the chart's key."""
    names = {}
    for chart in charts:
        names[chart.key] = f"{chart.key}.png"
        _figure(chart).savefig(folder / names[chart.key], dpi=160)
    return names


def write_pdf(charts: Sequence[Chart], path: Path) -> None:
    """All charts in one PDF, one on a page."""
    _need()
    from matplotlib.backends.backend_pdf import PdfPages

    with PdfPages(path) as pages:
        for chart in charts:
            pages.savefig(_figure(chart))


def _need() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "PNG and PDF are drawn by matplotlib, which is not installed; install it with `pip "
            "install 'hpctrain[plot]'`, or ask for --format html,csv,md,tex"
        ) from error


def _figure(chart: Chart) -> Figure:
    """A figure without pyplot: no display, and nothing global is left behind."""
    _need()
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    if isinstance(chart, LineChart):
        _lines(axes, chart)
    else:
        _bars(axes, chart)
    axes.set_title(chart.title, fontsize=11)
    axes.set_ylabel(chart.y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6eaee")
    axes.set_axisbelow(True)
    return figure


def _lines(axes: Any, chart: LineChart) -> None:
    for line in chart.lines:
        if line.is_ideal:
            axes.plot(line.x, line.y, color="#6a737d", linestyle=(0, (4, 4)), label=line.label)
            continue
        colour, dash = COLOURS[line.style % len(COLOURS)], DASHES[line.style % len(DASHES)]
        few = line.has_markers and len(line.x) <= _FEW
        style = (0, tuple(d / 2 for d in dash)) if dash else "-"
        marker = MARKERS[line.style % len(MARKERS)] if few else None
        axes.plot(
            line.x, line.y, color=colour, linestyle=style, marker=marker, label=line.label, lw=1.8
        )
        if line.low and few:
            below = [max(0.0, y - low) for y, low in zip(line.y, line.low, strict=True)]
            above = [max(0.0, high - y) for y, high in zip(line.y, line.high, strict=True)]
            axes.errorbar(
                line.x, line.y, yerr=[below, above], fmt="none", ecolor=colour, capsize=3, lw=1
            )
        elif line.low:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, lw=0)
    _mark(axes, chart)
    _scales(axes, chart)
    axes.set_xlabel(chart.x_label)
    axes.legend(fontsize=8, frameon=False)


def _mark(axes: Any, chart: LineChart) -> None:
    styles = ("dotted", "dashed", "solid")
    seen: set[str] = set()
    for mark in chart.marks:
        label = None if mark.label in seen else mark.label
        seen.add(mark.label)
        style = styles[mark.style % len(styles)]
        axes.axvline(mark.x, color="#57606a", linestyle=style, lw=1, label=label)


def _scales(axes: Any, chart: LineChart) -> None:
    if chart.x_scale in ("log2", "bytes"):
        axes.set_xscale("log", base=2)
        x = make_axis([v for line in chart.lines for v in line.x], chart.x_scale)
        axes.set_xticks([v for v, _ in x.ticks], [text for _, text in x.ticks])
        axes.minorticks_off()
    if chart.y_scale == "log10":
        axes.set_yscale("log")
    elif chart.y_scale == "log2":
        axes.set_yscale("log", base=2)
        y = _y_axis(chart)
        axes.set_yticks([v for v, _ in y.ticks], [text for _, text in y.ticks])
        axes.minorticks_off()
    elif chart.y_scale == "linear":
        axes.set_ylim(bottom=0)
    if chart.is_percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def _y_axis(chart: LineChart) -> Axis:
    heights = [v for line in chart.lines for v in (*line.y, *line.low, *line.high)]
    return make_axis(heights, "log2")


def _bars(axes: Any, chart: Bars) -> None:
    is_stack = len(chart.parts) > 1
    styles = chart.styles or tuple(range(max(len(chart.parts), len(chart.labels))))
    places = range(len(chart.labels))
    base = [0.0] * len(chart.labels)
    for number, (name, values) in enumerate(chart.parts):
        chosen = [styles[number if is_stack else index] for index in places]
        axes.bar(
            places,
            values,
            0.66,
            bottom=base,
            label=name if is_stack else None,
            color=[_light(style) for style in chosen],
            edgecolor="#24292f",
            linewidth=0.6,
            hatch=[HATCHES[style % len(HATCHES)] for style in chosen],
        )
        base = [before + value for before, value in zip(base, values, strict=True)]
    if chart.high:
        below = [max(0.0, top - low) for top, low in zip(base, chart.low, strict=True)]
        above = [max(0.0, high - top) for top, high in zip(base, chart.high, strict=True)]
        axes.errorbar(places, base, yerr=[below, above], fmt="none", ecolor="#1a1a1a", capsize=3)
    peaks = [max(pair) for pair in zip(base, chart.high or base, strict=True)]
    for place, top, peak in zip(places, base, peaks, strict=True):
        axes.annotate(
            number_text(top), (place, peak), (0, 3), textcoords="offset points", ha="center", size=8
        )
    # An empty part on the tallest bar would leave its number no room under the title.
    axes.set_ylim(0, 1.08 * max(peaks) or None)
    axes.set_xticks(places, [label.replace(" ", "\n") for label in chart.labels], fontsize=8)
    if sum(max(map(len, label.split())) for label in chart.labels) > _LETTERS_IN_A_ROW:
        axes.tick_params(axis="x", labelrotation=35)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
    if is_stack:
        axes.legend(fontsize=8, frameon=False)


def _light(style: int) -> str:
    """The ground of a hatched bar: full where there is no hatch."""
    colour = COLOURS[style % len(COLOURS)]
    if not HATCHES[style % len(HATCHES)]:
        return colour
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - 0.35 * (255 - part)):02x}" for part in parts)
