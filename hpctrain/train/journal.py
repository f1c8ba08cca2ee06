"""metrics.jsonl: what a run measured, line by line; and CSV, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from hpctrain import log
from hpctrain.atomic import replacing
from hpctrain.train.config import Logging
from hpctrain.train.directory import RunDirectory, replace_file
from hpctrain.train.progress import Progress

__all__ = [
    "CsvLog",
    "Journal",
    "Logger",
    "TensorBoardLog",
    "WandbLog",
    "make_loggers",
    "read_lines",
]


METRICS_NAME = "metrics.jsonl"


class Journal:
    """The lines of a run; every rank counts them, rank 0 writes them.

    Each line has `seq`, the number of lines measured so far. It is saved with every checkpoint, and
    a run that resumes from one drops the lines that came after it: they are measured again.

    Args:
        directory: The run directory; None counts and writes nothing.
        progress: Where the lines are counted.
    """

    def __init__(self, directory: Path | None, progress: Progress) -> None:
        self._progress = progress
        self._path = None if directory is None else directory / METRICS_NAME
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
        with replacing(self._path, sync=True) as draft, draft.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
        if kept:
            self.earlier_s = float(kept[-1].get("time_s", 0.0))
            self._began -= self.earlier_s
        self._file = self._path.open("a", buffering=1)
        return kept, max((int(line.get("seq", 0)) for line in found), default=0)

    def measure(self, kind: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Write a line of metrics that is the same on all ranks and counts."""
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


_PLACE = ("kind", "step", "epoch", "time_s", "wall", "seq")
"""What every line begins with."""
_FOLDERS = {"step": "train", "eval": "evaluation"}
_NOT_SCALARS = (*_PLACE, "best", "seconds")


class Logger(Protocol):
    """Takes the lines that a run measures."""

    def open(self, kept: Sequence[Mapping[str, Any]], *, last_seq: int) -> None:
        """Begin after the lines that are kept; `last_seq` was the last before a restart."""

    def write(self, line: Mapping[str, Any]) -> None:
        """A line that was measured, as the journal has it."""

    def close(self, *, failed: bool) -> None:
        """The run, or this job of it, is over."""


def make_loggers(directory: RunDirectory, options: Logging, config: str | None) -> list[Logger]:
    """Those that a configuration enables."""
    loggers: list[Logger] = []
    if options.csv:
        loggers.append(CsvLog(directory.csv))
    if options.tensorboard:
        loggers.append(TensorBoardLog(directory.tensorboard))
    if options.wandb != "off":
        loggers.append(
            WandbLog(directory, mode=options.wandb, project=options.wandb_project, config=config)
        )
    return loggers


class CsvLog:
    """A table with one row a line; a column that comes later is empty in the rows before.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[str] = []
        self._file: TextIO | None = None

    def open(self, kept: Sequence[Mapping[str, Any]], *, last_seq: int) -> None:
        """Write the table of the lines that are kept, whatever was in the file."""
        self._names = list(_PLACE)
        for line in kept:
            self._names += [name for name in line if name not in self._names]
        self._rewrite([{**line} for line in kept])

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a row."""
        new = [name for name in line if name not in self._names]
        if new:
            self._names += new
            with self._path.open(newline="") as file:
                rows: list[dict[str, Any]] = list(csv.DictReader(file))
            self._rewrite(rows)
        if self._file is not None:
            csv.DictWriter(self._file, self._names).writerow(dict(line))
            self._file.flush()

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._file is not None:
            self._file.close()
        with replacing(self._path) as draft, draft.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(rows)
        self._file = self._path.open("a", newline="")

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardLog:
    """Events for TensorBoard.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: Any = None

    def open(self, kept: Sequence[Mapping[str, Any]], *, last_seq: int) -> None:
        """Later steps than those of the lines that are kept are hidden from now on."""
        from torch.utils.tensorboard.writer import SummaryWriter

        after = max((int(line["step"]) for line in kept), default=0)
        self._events = SummaryWriter(str(self._folder), purge_step=after + 1 if after else None)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of a line."""
        for name, value in _scalars(line):
            self._events.add_scalar(name, value, line["step"])

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        if self._events is not None:
            self._events.close()


class WandbLog:
    """A run of Weights & Biases; it has one id over all jobs of the run.

    What was sent cannot be taken back, so lines that are measured again after a restart are not
    sent again.

    Args:
        directory: The run directory.
        mode: `offline` or `online`.
        project: Its project.
        config: The configuration as TOML, shown with the run.
    """

    def __init__(
        self, directory: RunDirectory, *, mode: str, project: str, config: str | None
    ) -> None:
        self._directory = directory
        self._mode, self._project, self._config = mode, project, config
        self._run: Any = None
        self._sent = 0

    def open(self, kept: Sequence[Mapping[str, Any]], *, last_seq: int) -> None:
        """Start the run, or resume it."""
        import tomllib

        import wandb

        try:
            known = str(json.loads(self._directory.wandb.read_text())["id"])
            self._sent = last_seq
        except FileNotFoundError:
            known = secrets.token_hex(4)
            replace_file(self._directory.wandb, json.dumps({"id": known}))
        self._run = wandb.init(
            project=self._project,
            id=known,
            name=self._directory.path.resolve().name,
            dir=str(self._directory.path),
            mode="online" if self._mode == "online" else "offline",
            resume="allow",
            config=tomllib.loads(self._config or ""),
            # What ranks print is in logs/, and what wandb says of itself is in its own.
            settings=wandb.Settings(console="off", silent=self._mode == "offline"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line, unless an earlier job has."""
        numbers = dict(_scalars(line))
        if line["seq"] > self._sent and numbers:
            self._run.log({"step": line["step"], "epoch": line["epoch"], **numbers})

    def close(self, *, failed: bool) -> None:
        """Finish this job's part."""
        if self._run is None:
            return
        self._run.finish(exit_code=int(failed))
        self._run = None
        if self._mode == "offline":
            log.notice(
                f"Weights & Biases: `wandb sync {self._directory.path / 'wandb'}/offline-run-*` "
                "uploads this run"
            )


def _scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a step or an evaluation, as `train/loss` or `evaluation/loss`."""
    folder = _FOLDERS.get(str(line["kind"]))
    for name, value in line.items() if folder else ():
        if name not in _NOT_SCALARS and isinstance(value, int | float):
            yield f"{folder}/{name}", value
