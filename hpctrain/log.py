"""What hpctrain says to people: one-line notices on standard error, and tables.

Output that is data goes to standard output by `print` in the verb that owns it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

__all__ = [
    "format_bytes",
    "format_done",
    "format_hours",
    "format_ranges",
    "format_seconds",
    "name_ranks",
    "notice",
    "table",
    "warn",
]

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def notice(text: str) -> None:
    """Tell the user what was chosen or done, and why."""
    print(f"hpctrain: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Tell the user about something that works now and may hurt later."""
    print(f"hpctrain: warning: {text}", file=sys.stderr, flush=True)


def format_bytes(number: float) -> str:
    """Write a number of bytes in the unit that suits it: `512 B`, `1.5 MiB`."""
    if number < 1024:
        return f"{number:.0f} B"
    power = min(int(math.log(number, 1024)), len(_UNITS))
    return f"{number / 1024**power:.1f} {_UNITS[power - 1]}"


def format_hours(hours: float) -> str:
    """Write a time in the unit that people would choose. Pure."""
    seconds = 3600 * hours
    if seconds < 90:
        return f"{seconds:.3g} s"
    if seconds < 5400:
        return f"{seconds / 60:.3g} min"
    if hours < 100:
        return f"{hours:.3g} h"
    return f"{hours / 24:.3g} days"


def format_done(done: int, asked: int | None, unit: str) -> str:
    """How much of the requested work is done, if nothing is left. Pure."""
    if asked is not None and done > asked:
        return f"{asked} {unit} were requested, and {done} are already done"
    return f"{done} of {asked} {unit} are done"


def format_ranges(numbers: Iterable[int], *, limit: int | None = None) -> str:
    """Write whole numbers as ranges, `0-3,7`, at most `limit` of them."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    if limit is not None and len(parts) > limit:
        parts = [*parts[:limit], f"... ({len(parts) - limit} more ranges)"]
    return ",".join(parts)


def name_ranks(ranks: Iterable[int], *, limit: int | None = 16) -> str:
    """Write `rank 3`, or `ranks 0-2,5`."""
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks, limit=limit)}"


def format_seconds(seconds: float) -> str:
    """Write a time in the unit that suits it: `85 ms`, `12.3 s`, `7 min`, `3 h 20 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    width: int | None = None,
) -> str:
    """Render rows as a plain-text table that reads the same on a terminal and in a batch log.

    Args:
        headers: Column names. Columns whose cells are all numbers are aligned to the right.
        rows: One sequence per row, as long as `headers`.
        title: A line above the table.
        width: Columns to fit into; None takes whatever the content needs.

    Returns:
        The table without a trailing newline and without colour codes.
    """
    import io

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[str(cell) for cell in row] for row in rows]
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, header in enumerate(headers):
        numeric = bool(cells) and all(_is_number(row[column]) for row in cells)
        drawn.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    out = io.StringIO()
    Console(file=out, width=width or 10_000, color_system=None, legacy_windows=False).print(drawn)
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    text = "\n".join(lines).strip("\n")
    return f"{title}\n{text}" if title else text


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("%"))
    except ValueError:
        return False
    return True
