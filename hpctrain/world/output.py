"""What ranks print reaches a shared log in whole lines."""

from __future__ import annotations

import io
import sys

__all__ = ["write_whole_lines"]


def write_whole_lines() -> None:
    """Make this process hand each line of its output on in one piece, as soon as it ends.

    Launchers mix what ranks write, piece by piece. Python writes the words of one `print` one by
    one with PYTHONUNBUFFERED=1, and without it in blocks that end in the middle of a line. Streams
    that were replaced (a notebook, a test that captures), and terminals, are not changed.
    """
    for now, first in ((sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)):
        if now is first and isinstance(now, io.TextIOWrapper) and not now.isatty():
            now.reconfigure(line_buffering=True, write_through=False)
