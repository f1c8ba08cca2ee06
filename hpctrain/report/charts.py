"""What a picture shows, without saying how it is drawn: for SVG and for matplotlib alike. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COLOURS", "DASHES", "HATCHES", "MARKERS", "Bars", "Chart", "Line", "LineChart", "Mark"]

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
    """What would be perfect, in grey and without points."""
    has_markers: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
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
    """What is seen, for those who cannot see it."""
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    x_scale: str = "linear"
    """`linear`, `log2` for numbers of ranks, or `bytes`."""
    y_scale: str = "linear"
    """`linear`, from 0, `free`, from where the data begin, `log2` or `log10`."""
    is_percent: bool = False
    marks: tuple[Mark, ...] = ()


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
