"""What a trainer puts into checkpoints beside the replicas and the loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.train.monitor import Monitor
from hpctrain.train.progress import Progress

__all__ = ["RunState"]


class RunState:
    """How far a run is and what was best, as one part of a saver.

    Args:
        progress: How far.
        monitor: What was best, for early stopping.
        best: What was best, for the checkpoint that is kept; None where none is.
    """

    def __init__(self, progress: Progress, monitor: Monitor, best: Monitor | None) -> None:
        self._progress, self._monitor, self._best = progress, monitor, best

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the same on every rank."""
        return {
            "progress": self._progress.state_dict(),
            "monitor": self._monitor.state_dict(),
            "best": None if self._best is None else self._best.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved values."""
        self._progress.load_state_dict(state["progress"])
        self._monitor.load_state_dict(state["monitor"])
        if self._best is not None and state["best"] is not None:
            self._best.load_state_dict(state["best"])
