"""How far a run is, in words: for rank 0's terminal or log, and for `hpctrain watch`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.errors import ConfigError
from hpctrain.exit_codes import REQUEUE
from hpctrain.train.directory import holder_of, is_held, read_summary
from hpctrain.train.journal import METRICS_NAME, read_lines

if TYPE_CHECKING:
    from hpctrain.world import World

__all__ = [
    "Display",
    "RunStatus",
    "Standing",
    "Ticker",
    "duration",
    "ending_line",
    "evaluation_line",
    "follow",
    "make_display",
    "show_once",
    "status_line",
]


_FIRST_S = 5.0
_LONGEST_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a run is."""

    step: int
    epoch: int
    num_steps: int | None = None
    num_epochs: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    """Of this job, on average."""
    left_s: float | None = None
    """Time left in the allocation."""
    slowest: tuple[int, float] | None = None
    """The slowest rank, and its step time relative to the median."""

    @property
    def eta_s(self) -> float | None:
        """How long the rest will take."""
        if self.num_steps is None or self.step_s is None:
            return None
        return max(0, self.num_steps - self.step) * self.step_s


def status_line(standing: Standing) -> str:
    """The line that a log or a terminal shows."""
    parts = [
        f"epoch {standing.epoch}" + (f"/{standing.num_epochs}" if standing.num_epochs else ""),
        f"step {standing.step}" + (f"/{standing.num_steps}" if standing.num_steps else ""),
    ]
    if standing.loss is not None:
        parts.append(f"loss {standing.loss:.4g}")
    if standing.learning_rate is not None:
        parts.append(f"lr {standing.learning_rate:.3g}")
    if standing.gradient_norm is not None:
        parts.append(f"gradient norm {standing.gradient_norm:.3g}")
    if standing.samples_per_s is not None:
        parts.append(f"{standing.samples_per_s:,.0f} samples/s")
    if standing.eta_s is not None:
        parts.append(f"ETA {duration(standing.eta_s)}")
    if standing.left_s is not None:
        parts.append(f"{duration(standing.left_s)} left in the allocation")
    if standing.slowest is not None:
        parts.append(f"slowest rank {standing.slowest[0]} ({standing.slowest[1]:.2f}x)")
    return ", ".join(parts)


def evaluation_line(line: Mapping[str, Any]) -> str:
    """What an evaluation measured."""
    fixed = ("kind", "step", "epoch", "time_s", "wall", "seq", "best", "seconds")
    numbers = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} not finite"
        for name, value in line.items()
        if name not in fixed
    )
    best = " (best so far)" if line.get("best") else ""
    return f"evaluation at step {line['step']}: {numbers}{best}"


def ending_line(summary: Mapping[str, Any]) -> str:
    """How a run ended: its steps and its time over all jobs, and those of a job that resumed it."""
    steps, job_steps = int(summary["steps"]), int(summary["job_steps"])
    text = f"{summary['state']} after {steps} steps in {duration(float(summary['seconds']))}"
    if steps != job_steps:
        text += f", of which {job_steps} in this job's {duration(float(summary['job_seconds']))}"
    return text


class Ticker:
    """When a plain log says something: often at first, then at growing intervals, up to 600 s."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._first = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether to say something now; then it counts as said."""
        if self._last is None:
            self._first = self._last = now_s
            return True
        wait = min(_LONGEST_S, max(_FIRST_S, (now_s - self._first) / 10))
        if now_s - self._last < wait:
            return False
        self._last = now_s
        return True


def duration(seconds: float) -> str:
    """Seconds for people: `42s`, `3m20s`, `5h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Display(Protocol):
    """Where a run is shown."""

    def show(self, standing: Standing) -> None:
        """How far it is; called often."""

    def say(self, text: str) -> None:
        """Something worth a line of its own."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Silent:
    """Shows nothing."""

    def show(self, standing: Standing) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Plain:
    """One line at growing intervals."""

    def __init__(self) -> None:
        self._ticker = Ticker()

    def show(self, standing: Standing) -> None:
        """Say it, if it is time."""
        if self._ticker.is_due(time.monotonic()):
            self.say(status_line(standing))

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def close(self) -> None:
        """Nothing to leave."""


class Live:
    """A bar that moves, on a terminal; through the pipe of `hpctrain run` as well."""

    def __init__(self, columns: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(force_terminal=True, width=columns - 8 if columns else None)
        words = TextColumn("{task.description}"), BarColumn(bar_width=None)
        self._progress = Progress(*words, console=console)
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def show(self, standing: Standing) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            completed=standing.step,
            total=standing.num_steps,
            description=status_line(standing),
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Stop the bar where it is."""
        self._progress.stop()


def make_display(world: World, kind: str) -> Display:
    """The display of this rank: `auto`, `live`, `plain` or `off`; only rank 0 shows something."""
    if world.rank != 0 or kind == "off":
        return Silent()
    columns = world.launch.terminal_columns
    if kind == "live" or (kind == "auto" and (columns is not None or sys.stdout.isatty())):
        return Live(columns)
    return Plain()


_CODES = {"finished": 0, "stopped": REQUEUE, "failed": 1}


class RunStatus:
    """The status of a run at one moment, from its files.

    Args:
        directory: The run directory.

    Raises:
        ConfigError: there is no run.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a run directory; name one")
        self.lines = list(read_lines(directory / METRICS_NAME))
        self.summary = read_summary(directory)
        if self.summary is None and not self.lines and holder_of(directory) is None:
            raise ConfigError(f"{directory} contains no run: no summary, no metrics, no lock")
        self.state = self._state(directory)

    def _state(self, directory: Path) -> str:
        """`running`, `finished`, `stopped`, `failed`, or `lost`: killed without a summary."""
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
            text += "\nthe job was killed; see logs/, and run it again to resume"
        return text

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        last = self.lines[-1] if self.lines else None
        return {"state": self.state, "summary": self.summary, "last": last}


def show_once(directory: Path, *, as_json: bool) -> int:
    """Print the status of a run."""
    seen = RunStatus(directory)
    print(json.dumps(seen.as_json(), indent=1) if as_json else seen.describe())
    return 0


def follow(
    directory: Path,
    *,
    every_s: float = 2.0,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Print new lines until the run ends.

    Args:
        directory: The run directory.
        every_s: Seconds between two reads.
        pause: Waits between two reads.

    Returns:
        The exit code that says how it ended.
    """
    if not every_s > 0:
        raise ConfigError(f"--every {every_s} must be above 0")
    shown: str | None = None
    told = 0
    while True:
        seen = RunStatus(directory)
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
