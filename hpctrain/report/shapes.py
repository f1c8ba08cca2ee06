"""The small shapes that charts are made of, as SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hpctrain.report.charts import COLOURS, DASHES, MARKERS

__all__ = ["HEIGHT", "LEFT", "RIGHT", "WIDTH", "hatch", "legend", "marker", "text"]

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
