"""Where a run's figures go: metrics.jsonl and other loggers, the display, the summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.faults import ask_job
from hpctrain.replica import Replica
from hpctrain.train.config import Logging
from hpctrain.train.directory import Lock, RunDirectory, describe_environment
from hpctrain.train.display import (
    Display,
    Silent,
    Standing,
    ending_line,
    evaluation_line,
    make_display,
)
from hpctrain.train.figures import Figures
from hpctrain.train.journal import Journal, Logger, make_loggers
from hpctrain.train.progress import Monitor, Progress
from hpctrain.world import World, agree

__all__ = ["Recorder", "make_summary", "open_directory"]


def make_summary(
    replica: Replica,
    progress: Progress,
    monitor: Monitor,
    *,
    state: str,
    failure: str | None,
    earlier_s: float,
    job_s: float,
    num_steps: int | None,
    used: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Make summary.json.

    `steps`, `epochs`, `samples` and `seconds` are those of the whole run, over all its jobs; what
    is called `job_`, and `samples_per_s`, are of this one.

    Args:
        replica: What was trained.
        progress: How far it is.
        monitor: What was best.
        state: `running`, `finished`, `stopped` (to be run again) or `failed`.
        failure: The rank and its exception.
        earlier_s: Seconds of earlier jobs, up to where the run was resumed.
        job_s: Seconds of this job.
        num_steps: The goal, where it is known.
        used: What this job used of what it had; None before its end.
    """
    world = replica.world
    return {
        "state": state,
        "metrics": progress.results,
        "monitor": {"name": monitor.name, **monitor.state_dict()},
        "steps": progress.step,
        "num_steps": num_steps,
        "epochs": progress.epochs_done,
        "samples": progress.samples,
        "seconds": earlier_s + job_s,
        "job_steps": progress.job_steps,
        "job_samples": progress.job_samples,
        "job_seconds": job_s,
        "samples_per_s": progress.job_samples / job_s if job_s > 0 else 0.0,
        "ranks": world.size,
        "nodes": world.num_nodes,
        "engine": replica.engine.name,
        "job_id": world.launch.job_id,
        "stop_reason": progress.stop_reason,
        "failure": failure,
        "used": None if used is None else dict(used),
    }


def open_directory(world: World, path: Path | None) -> tuple[RunDirectory | None, Lock | None]:
    """Collective: make the run directory and lock it, on rank 0; `path` must match.

    Raises:
        ConfigError: on all ranks: it cannot be made, or another job is in it.
    """
    if path is None:
        return None, None
    directory, lock, trouble = RunDirectory(path), None, None
    if world.rank == 0:
        try:
            directory.make()
            launch = world.launch
            lock = Lock(
                path,
                job_id=launch.job_id,
                batch_system=launch.batch_system,
                cluster=launch.cluster,
                ask=ask_job,
            )
        except (ConfigError, OSError) as error:
            trouble = str(error)
    agree(world.comm, trouble, error=ConfigError)
    return directory, lock


class Recorder:
    """Writes and shows what a run measures; every rank has one, rank 0's does something.

    Args:
        world: The ranks.
        directory: The run directory, opened; None writes nothing.
        options: What is written and shown.
        progress: How far the run is.
        goal: How many steps and epochs there will be, where that is known.
        config: The configuration as TOML, kept in the directory.
    """

    def __init__(
        self,
        world: World,
        directory: RunDirectory | None,
        options: Logging,
        progress: Progress,
        *,
        goal: tuple[int | None, int | None],
        config: str | None = None,
    ) -> None:
        writes = directory is not None and world.rank == 0
        self.directory = directory
        self.earlier_s = 0.0
        """Seconds that earlier jobs of this run took, up to where it was resumed."""
        self._world = world
        self.journal = Journal(
            directory.path if directory is not None and writes else None, progress
        )
        self._progress = progress
        self._writes = writes
        self._goal = goal
        self._display: Display = make_display(world, options.display)
        self._config = config
        self.is_open = False
        self._loggers: list[Logger] = []
        if directory is not None and writes:
            self._loggers = make_loggers(directory, options, config)

    def open(self) -> None:
        """Collective: start writing after what was restored; later lines are dropped.

        Until here everything in the directory is as an earlier job has left it.

        Raises:
            ConfigError: on all ranks; a logger cannot begin.
        """
        trouble = None
        try:
            if self.directory is not None and self._writes:
                self.directory.write_environment(describe_environment(self._world))
                if self._config is not None:
                    self.directory.write_config(self._config)
            kept, last_seq = self.journal.open()
            measured = [line for line in kept if line["kind"] != "event"]
            for logger in self._loggers:
                logger.open(measured, last_seq=last_seq)
        except Exception as error:  # of packages that have their own
            trouble = f"the run cannot be recorded: {type(error).__name__}: {error}"
        agree(self._world.comm, trouble, error=ConfigError)
        self.earlier_s = self._world.comm.bcast(self.journal.earlier_s, root=0)
        self.is_open = True

    def step(self, figures: Figures, steps: Mapping[str, float], *, left_s: float | None) -> None:
        """The figures of an interval that ended with this step, and this step's own."""
        step = self._progress.step
        numbers = {
            **steps,
            **figures.numbers,
            "samples_per_s": figures.samples_per_s,
            "step_s": figures.step_s,
            **figures.split,
        }
        if figures.slowest is not None:
            numbers["slowest_rank"], numbers["slowest_ratio"] = figures.slowest
        self.measure("step", numbers)
        num_steps, num_epochs = self._goal
        self._display.show(
            Standing(
                step=step,
                epoch=self._progress.epochs_done + 1,
                num_steps=num_steps,
                num_epochs=num_epochs,
                loss=figures.numbers.get("loss"),
                learning_rate=steps.get("lr"),
                gradient_norm=steps.get("grad_norm"),
                samples_per_s=figures.samples_per_s,
                step_s=figures.step_s,
                left_s=left_s,
                slowest=figures.slowest,
            )
        )

    def evaluated(self, metrics: Mapping[str, float], *, best: bool, seconds: float) -> None:
        """What an evaluation measured."""
        line = self.measure("eval", {**metrics, "best": best, "seconds": seconds})
        self._display.say(evaluation_line(line))

    def measure(self, kind: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Write a line that counts."""
        line = self.journal.measure(kind, numbers)
        for logger in self._loggers:
            logger.write(line)
        return line

    def say(self, text: str) -> None:
        """Show a line."""
        self._display.say(text)

    def summarise(self, summary: Mapping[str, Any], *, anyone: bool = False) -> None:
        """Write summary.json; `anyone`: on this rank, whichever it is, since it fails."""
        if self.directory is not None and (self._writes or anyone):
            self.directory.write_summary(summary)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Show how the run ended, and close everything."""
        if summary.get("state") != "failed":
            self._display.say(ending_line(summary))
        self._display.close()
        self._display = Silent()
        self.journal.close()
        for logger in self._loggers:
            logger.close(failed=summary.get("state") == "failed")
