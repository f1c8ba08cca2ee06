"""Puts the lines of many ranks on one terminal or into one log, whole and labelled.

A carriage return rewrites a line, as progress bars do: such a line is redrawn below what others
say.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import BinaryIO

__all__ = ["Screen"]

# A prompt has no newline: show an unfinished line when it has rested this long. A line that is
# being rewritten, as progress bars are, is shown at once.
_REST_S = 0.05

_LAST_WORDS_BYTES = 16 << 10

_Source = tuple[int | None, str]


@dataclass(eq=False)
class Screen:
    """Standard output and error of `hpctrain run`."""

    out: BinaryIO
    err: BinaryIO
    label: bool
    """Whether lines carry their rank."""
    live: bool
    """Whether there is a terminal, where lines can be rewritten."""
    num_ranks: int
    only_rank: int | None = None
    """Show this rank alone."""
    hold_launcher: bool = False
    """Suppress the launcher's own output: once all ranks are connected, it is only noise."""
    launcher_words: bytes = b""
    hidden: dict[int, bytes] = field(default_factory=dict)
    """The last output of hidden ranks, in case one of them fails."""
    _pending: dict[_Source, bytes] = field(default_factory=dict)
    _touched: dict[_Source, float] = field(default_factory=dict)
    _shown: tuple[_Source, bytes] | None = None
    """The unfinished line now on the screen."""

    def feed(self, rank: int | None, stream: str, data: bytes) -> None:
        """Take what a rank wrote (None: the launcher); print the lines that are complete."""
        if rank is None and self.hold_launcher:
            self.launcher_words += data
            return
        if rank is not None and self.only_rank is not None and rank != self.only_rank:
            self.hidden[rank] = (self.hidden.get(rank, b"") + data)[-_LAST_WORDS_BYTES:]
            return
        source = (rank, stream)
        *lines, rest = (self._pending.get(source, b"") + data).split(b"\n")
        for line in lines:
            self._line(source, line)
        self._pending[source] = rest
        self._touched[source] = time.monotonic()

    def show_partial_lines(self) -> None:
        """Show unfinished lines that have rested: prompts, progress bars."""
        if not self.live:
            return
        now = time.monotonic()
        for source, rest in self._pending.items():
            ready = b"\r" in rest or now - self._touched[source] >= _REST_S
            if rest and ready and self._shown != (source, rest):
                self._clear()
                self._file(source).write(self._prefix(source) + _last_rewrite(rest))
                self._file(source).flush()
                self._shown = (source, rest)

    def finish(self) -> None:
        """Print what was left without a newline."""
        for source, rest in list(self._pending.items()):
            if rest:
                self._line(source, rest)
        self._pending.clear()

    def _line(self, source: _Source, line: bytes) -> None:
        standing = self._shown
        self._clear()
        text = line if not self.live else _last_rewrite(line)
        self._file(source).write(self._prefix(source) + text + b"\n")
        self._file(source).flush()
        if standing is not None and standing[0] != source:
            # Another rank's unfinished line is drawn again, below.
            self._file(standing[0]).write(self._prefix(standing[0]) + _last_rewrite(standing[1]))
            self._file(standing[0]).flush()
            self._shown = standing

    def _clear(self) -> None:
        if self._shown is not None:
            self._file(self._shown[0]).write(b"\r\x1b[2K")
            self._file(self._shown[0]).flush()
            self._shown = None

    def _prefix(self, source: _Source) -> bytes:
        rank = source[0]
        if not self.label or rank is None:
            return b""
        return f"[{rank:>{len(str(self.num_ranks - 1))}}] ".encode()

    def _file(self, source: _Source) -> BinaryIO:
        return self.out if source[1] == "out" else self.err


def _last_rewrite(line: bytes) -> bytes:
    """What remains visible of a line with carriage returns in it."""
    visible = [part for part in line.split(b"\r") if part]
    # Progress bars erase the line first; that would erase our label as well.
    return visible[-1].removeprefix(b"\x1b[2K") if visible else b""
