"""Showing how far the compiler has come: a bar on a terminal, a line every tenth in a batch log."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpctrain import log

__all__ = ["percent", "shown"]

_STEP = 10


def percent(line: str) -> int | None:
    """Pure: how far a line of make's output says it is, as `[ 45%] Building` does."""
    match = re.match(r"\s*\[\s*(\d{1,3})%\]", line)
    return min(100, int(match.group(1))) if match else None


@contextmanager
def shown(title: str) -> Iterator[Callable[[int], None]]:
    """Give a function to call with the percentage reached, while the block runs."""
    if sys.stderr.isatty():
        with _bar(title) as update:
            yield update
        return
    started = time.monotonic()
    next_step = _STEP

    def tell(done: int) -> None:
        nonlocal next_step
        if done >= next_step:
            log.notice(f"{title}: {done} %, {time.monotonic() - started:.0f} s")
            next_step = (done // _STEP + 1) * _STEP

    yield tell


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("hpctrain: {task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=100)
        yield lambda done: progress.update(task, completed=done)
