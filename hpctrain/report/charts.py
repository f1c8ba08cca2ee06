"""What a picture shows, without saying how it is drawn. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log2, log10

from hpctrain.log import format_bytes

__all__ = [
    "COLOURS",
    "DASHES",
    "HATCHES",
    "MARKERS",
    "Axis",
    "Bars",
    "Chart",
    "EventMark",
    "Line",
    "LineChart",
    "make_axis",
    "number_text",
]

# Told apart by colour-blind readers, and by their dashes, markers and hatches in black and white.
COLOURS = ("#0b5fa5", "#c44601", "#00785a", "#8a3b83", "#8f6b00", "#2f7fb5", "#555555")
DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (7, 3),
    (2, 2.5),
    (9, 3, 2, 3),
    (4, 2),
    (12, 3, 2, 3, 2, 3),
    (1, 3),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""Of matplotlib's names."""
HATCHES = ("", "////", "....", "\\\\\\\\", "----", "xxxx", "++")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A curve."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Interval of every point; empty: none is known."""
    style: int = 0
    """Which colour, dash and marker."""
    is_ideal: bool = False
    """The ideal curve, in grey and without points."""
    has_markers: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class EventMark:
    """Something that happened at a place of the horizontal axis."""

    x: float
    label: str
    style: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChart:
    """Curves over one horizontal axis."""

    key: str
    """Names the file and the parts of the page; unique in a report."""
    title: str
    description: str
    """A text alternative for the chart."""
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    x_scale: str = "linear"
    """`linear`, `log2` for numbers of ranks, or `bytes`."""
    y_scale: str = "linear"
    """`linear`, from 0, `free`, from where the data begin, `log2` or `log10`."""
    is_percent: bool = False
    marks: tuple[EventMark, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Bars side by side, each a stack of the same parts."""

    key: str
    title: str
    description: str
    y_label: str
    labels: tuple[str, ...]
    parts: tuple[tuple[str, tuple[float, ...]], ...]
    """Name of a part, and its height in every bar."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Interval of every bar's whole height."""
    styles: tuple[int, ...] = ()
    """Of the parts, or of the bars where there is one part; by default in their order."""


Chart = LineChart | Bars


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis from `low` to `high`."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    scale: str = "linear"

    def place(self, value: float) -> float:
        """Where a value lies: 0 at the beginning, 1 at the end."""
        if self.scale == "linear":
            return (value - self.low) / (self.high - self.low)
        smallest = min(self.low, self.high) / 1e6
        return log2(max(value, smallest) / self.low) / log2(self.high / self.low)


def make_axis(
    values: Sequence[float],
    scale: str,
    *,
    is_percent: bool = False,
    from_zero: bool = True,
    most: int = 7,
) -> Axis:
    """An axis that shows all values.

    Args:
        values: At least one finite number; those of logarithmic axes are above 0.
        scale: `linear`, `log2` (the values themselves are written, as numbers of ranks are),
            `bytes` (the same in KiB and MiB) or `log10`.
        is_percent: Whether 1 is written as 100 %.
        from_zero: Whether a linear axis begins at 0 where no value is below.
        most: How many numbers may be written.
    """
    known = [value for value in values if isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if scale in ("log2", "bytes"):
        write = _bytes if scale == "bytes" else "{:g}".format
        return _log2(sorted(set(known)), most, write)
    if scale == "log10":
        return _log10(low, high)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    if is_percent and from_zero and 1 < high <= 1.1:  # just above: nothing is written there
        return Axis(low=0.0, high=1.1, ticks=tuple((k / 5, f"{20 * k} %") for k in range(6)))
    step = _nice((high - low) / max(1, most - 1))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    texts = [
        (k * step, _percent(k * step) if is_percent else number_text(k * step, step))
        for k in range(first, last + 1)
    ]
    return Axis(low=first * step, high=last * step, ticks=tuple(texts))


def _log2(values: list[float], most: int, write: Callable[[float], str]) -> Axis:
    low, high = values[0], values[-1]
    if low == high:
        low, high = low / 2, high * 2
    margin = (high / low) ** 0.04
    written = values
    if not all(float(value).is_integer() for value in values):  # measured: powers of two will do
        written = [2.0**k for k in range(floor(log2(low) + 0.15), ceil(log2(high) - 0.15) + 1)]
        low, high, margin = written[0], max(high, written[-1]), 1.0
    while len(written) > most:
        written = written[::-2][::-1]
    ticks = tuple((value, write(value)) for value in written)
    return Axis(low=low / margin, high=high * margin, ticks=ticks, scale="log2")


def _bytes(value: float) -> str:
    return format_bytes(value).replace(".0 ", " ")


def _log10(low: float, high: float) -> Axis:
    first, last = floor(log10(low) + 1e-9), ceil(log10(high) - 1e-9)
    last = max(last, first + 1)
    ticks = tuple((10.0**k, number_text(10.0**k)) for k in range(first, last + 1))
    return Axis(low=10.0**first, high=10.0**last, ticks=ticks, scale="log10")


def _nice(step: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is not below."""
    power: float = 10.0 ** floor(log10(step))
    return next(
        factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9)
    )


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def number_text(value: float, step: float | None = None) -> str:
    """A number as people write it, with as many digits as the step between numbers needs."""
    if value == 0:
        return "0"
    size = abs(value)
    if step is not None:
        if size >= 1e6 and step >= 1e4:
            return f"{value / 1e6:g} M"
        if size >= 10_000 and step >= 100:
            return f"{value / 1e3:g} k"
        digits = max(0, -floor(log10(step) + 1e-9))
        digits += float(f"{step:.{digits}f}") != step and digits < 9
        return f"{value:.{digits}f}"
    if size >= 1e6:
        return f"{value / 1e6:.3g} M"
    if size >= 10_000:
        return f"{value / 1e3:.3g} k"
    return f"{value:.0f}" if size >= 100 else f"{value:.3g}"
