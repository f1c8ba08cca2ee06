"""What rank 0 shows while it trains: a live line on a terminal, plain lines in a batch log."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from hpctrain.train.showing import Standing, Ticker, status_line
from hpctrain.world import World

__all__ = ["Display", "make_display"]


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
