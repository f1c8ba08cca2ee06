"""Where a run's figures go: metrics.jsonl, TensorBoard, the display, the summary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.train.config import Logging
from hpctrain.train.directory import RunDirectory, describe_environment
from hpctrain.train.display import Display, Silent, make_display
from hpctrain.train.figures import Figures
from hpctrain.train.journal import Journal
from hpctrain.train.lock import Lock
from hpctrain.train.progress import Progress
from hpctrain.train.showing import Standing, ending_line, evaluation_line
from hpctrain.world import World, agree

__all__ = ["Recorder", "open_directory"]


def open_directory(
    world: World, path: Path | None, *, config: str | None = None
) -> tuple[RunDirectory | None, Lock | None]:
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
            lock = Lock(path, job_id=world.launch.job_id)
            directory.write_environment(describe_environment(world))
            if config is not None:
                directory.write_config(config)
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
    """

    def __init__(
        self,
        world: World,
        directory: RunDirectory | None,
        options: Logging,
        progress: Progress,
        *,
        goal: tuple[int | None, int | None],
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
        self._events: Any = None
        self._folder = directory.tensorboard if directory and writes else None
        self._options = options

    def open(self) -> None:
        """Collective: begin to write after what was restored; what comes again replaces it."""
        self.journal.open()
        self.earlier_s = self._world.comm.bcast(self.journal.earlier_s, root=0)
        if self._options.tensorboard and self._folder is not None:
            self._events = _open_events(self._folder, after=self._progress.step)

    def step(self, figures: Figures, *, left_s: float | None) -> None:
        """The figures of an interval that ended with this step."""
        step = self._progress.step
        numbers = {
            **figures.numbers,
            "samples_per_s": figures.samples_per_s,
            "step_s": figures.step_s,
            **figures.split,
        }
        if figures.slowest is not None:
            numbers["slowest_rank"], numbers["slowest_ratio"] = figures.slowest
        self.journal.measure("step", numbers)
        self._add_events(numbers, step, "train")
        num_steps, num_epochs = self._goal
        self._display.show(
            Standing(
                step=step,
                epoch=self._progress.epochs_done + 1,
                num_steps=num_steps,
                num_epochs=num_epochs,
                loss=figures.numbers.get("loss"),
                samples_per_s=figures.samples_per_s,
                step_s=figures.step_s,
                left_s=left_s,
                slowest=figures.slowest,
            )
        )

    def evaluated(self, metrics: Mapping[str, float], *, best: bool, seconds: float) -> None:
        """What an evaluation measured."""
        line = self.journal.measure("eval", {**metrics, "best": best, "seconds": seconds})
        self._add_events(metrics, self._progress.step, "evaluation")
        self._display.say(evaluation_line(line))

    def say(self, text: str) -> None:
        """Show a line."""
        self._display.say(text)

    def summarise(self, summary: Mapping[str, Any], *, anyone: bool = False) -> None:
        """Write summary.json; `anyone`: on this rank, whichever it is, since it fails."""
        if self.directory is not None and (self._writes or anyone):
            self.directory.write_summary(summary)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the last word, and close everything."""
        if summary.get("state") != "failed":
            self._display.say(ending_line(summary))
        self._display.close()
        self._display = Silent()
        self.journal.close()
        if self._events is not None:
            self._events.close()

    def _add_events(self, numbers: Mapping[str, Any], step: int, folder: str) -> None:
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(f"{folder}/{name}", value, step)


def _open_events(folder: Path, *, after: int) -> Any:
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(str(folder), purge_step=after + 1 if after else None)
