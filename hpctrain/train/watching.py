"""Following a run by its files alone, on a login node too: neither torch nor MPI."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.exit_codes import REQUEUE
from hpctrain.train.directory import read_summary
from hpctrain.train.journal import NAME, read_lines
from hpctrain.train.lock import holder_of, is_held
from hpctrain.train.showing import Standing, evaluation_line, status_line

__all__ = ["Look", "follow", "look", "show_once"]

_CODES = {"finished": 0, "stopped": REQUEUE, "failed": 1}


class Look:
    """What the files of a run say at one moment.

    Args:
        directory: The run directory.

    Raises:
        ConfigError: there is no run.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no run directory; name the one of a training")
        self.lines = list(read_lines(directory / NAME))
        self.summary = read_summary(directory)
        if self.summary is None and not self.lines and holder_of(directory) is None:
            raise ConfigError(f"{directory} has no run in it: no summary, no metrics, no lock")
        self.state = self._state(directory)

    def _state(self, directory: Path) -> str:
        """`running`, `finished`, `stopped`, `failed`, or `lost`: killed without a last word."""
        said = str((self.summary or {}).get("state", "running"))
        if is_held(directory):
            return "running"
        return said if said != "running" else "lost"

    @property
    def standing(self) -> Standing | None:
        """How far the last step line was; None before the first."""
        steps = [line for line in self.lines if line.get("kind") == "step"]
        if not steps:
            return None
        last, summary = steps[-1], self.summary or {}
        slowest = last.get("slowest_rank")
        return Standing(
            step=int(last["step"]),
            epoch=int(last["epoch"]) + 1,
            num_steps=summary.get("num_steps"),
            loss=last.get("loss"),
            learning_rate=last.get("lr"),
            gradient_norm=last.get("grad_norm"),
            samples_per_s=last.get("samples_per_s"),
            step_s=last.get("step_s"),
            slowest=None if slowest is None else (int(slowest), float(last["slowest_ratio"])),
        )

    def describe(self) -> str:
        """One line, or two."""
        standing, summary = self.standing, self.summary or {}
        text = self.state if standing is None else f"{self.state}: {status_line(standing)}"
        evaluations = [line for line in self.lines if line.get("kind") == "eval"]
        if evaluations:
            text += "\n" + evaluation_line(evaluations[-1])
        if self.state == "failed" and summary.get("failure"):
            text += f"\n{summary['failure']}"
        if self.state == "lost":
            text += "\nthe job ended without a last word; see logs/, and start it again to go on"
        return text

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        last = self.lines[-1] if self.lines else None
        return {"state": self.state, "summary": self.summary, "last": last}


def look(directory: Path) -> Look:
    """Read the files of a run."""
    return Look(directory)


def show_once(directory: Path, *, as_json: bool) -> int:
    """Print where a run stands."""
    seen = look(directory)
    print(json.dumps(seen.as_json(), indent=1) if as_json else seen.describe())
    return 0


def follow(
    directory: Path,
    *,
    every_s: float = 2.0,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Print what comes, until the run ends.

    Args:
        directory: The run directory.
        every_s: How often to look.
        pause: What waits between two looks.

    Returns:
        The exit code that says how it ended.
    """
    if not every_s > 0:
        raise ConfigError(f"--every {every_s} must be above 0")
    shown: str | None = None
    told = 0
    while True:
        seen = look(directory)
        for line in seen.lines[told:]:
            said = _remark(line)
            if said:
                print(said, flush=True)
        told = len(seen.lines)
        standing = seen.standing
        now = status_line(standing) if standing is not None else "no step yet"
        if now != shown:
            print(now, flush=True)
            shown = now
        if seen.state != "running":
            print(seen.describe().splitlines()[0], flush=True)
            sys.stdout.flush()
            return _CODES.get(seen.state, 1)
        pause(every_s)


def _remark(line: Mapping[str, Any]) -> str | None:
    if line.get("kind") == "eval":
        return evaluation_line(line)
    if line.get("kind") == "event":
        return f"{line.get('event')} at step {line.get('step')}"
    return None
