"""metrics.jsonl: what a run measured, one JSON object a line, without doubles after a restart."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from hpctrain.train.progress import Progress

__all__ = ["Journal", "read_lines"]

NAME = "metrics.jsonl"


class Journal:
    """The lines of a run; every rank counts them, rank 0 writes them.

    Each line has `seq`, the number of lines measured so far. It is saved with every checkpoint, and
    a run that goes on from one drops the lines that came after it: they are measured again.

    Args:
        directory: The run directory; None counts and writes nothing.
        progress: Where the lines are counted.
    """

    def __init__(self, directory: Path | None, progress: Progress) -> None:
        self._progress = progress
        self._path = None if directory is None else directory / NAME
        self._file: TextIO | None = None
        self._began = time.monotonic()
        self.earlier_s = 0.0
        """Seconds that earlier jobs took for the lines that are kept."""

    def open(self) -> tuple[list[dict[str, Any]], int]:
        """Begin after the lines that are counted; later ones are dropped.

        Returns:
            The lines that were kept, and the number of the last line that was there.
        """
        if self._path is None:
            return [], 0
        seq = self._progress.seq
        found = list(read_lines(self._path))
        kept = [line for line in found if line.get("seq", 0) <= seq]
        draft = self._path.with_suffix(".draft")
        with draft.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        if kept:
            self.earlier_s = float(kept[-1].get("time_s", 0.0))
            self._began -= self.earlier_s
        self._file = self._path.open("a", buffering=1)
        return kept, max((int(line.get("seq", 0)) for line in found), default=0)

    def measure(self, kind: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Write what all ranks know alike: a line that counts."""
        self._progress.seq += 1
        return self._write(kind, numbers)

    def remark(self, event: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write what happened: a line of kind `event` that does not count."""
        return self._write("event", {"event": event, **facts})

    def _write(self, kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        line = {
            "kind": kind,
            "step": self._progress.step,
            "epoch": self._progress.epochs_done,
            "time_s": round(time.monotonic() - self._began, 6),
            "wall": round(time.time(), 3),
            "seq": self._progress.seq,
            **{name: _plain(value) for name, value in facts.items()},
        }
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        return line

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal; one that a killed run left half written is left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return value
