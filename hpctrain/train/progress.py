"""How far a run is, over all its jobs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.log import format_done

__all__ = ["Progress"]


class Progress:
    """Counts that all ranks keep alike, and that go into every checkpoint."""

    def __init__(self) -> None:
        self.step = 0
        self.epochs_done = 0
        self.samples = 0
        self.seq = 0
        """Lines of metrics.jsonl that have been measured."""
        self.results: dict[str, float] = {}
        """What the last evaluation measured."""
        self.evaluated_step: int | None = None
        self.stop_reason: str | None = None
        self.began_with = 0
        """Samples before this job."""
        self.began_at = 0
        """Steps before this job."""

    @property
    def job_samples(self) -> int:
        """Samples of this job."""
        return self.samples - self.began_with

    @property
    def job_steps(self) -> int:
        """Steps of this job."""
        return self.step - self.began_at

    @property
    def fresh_results(self) -> dict[str, float]:
        """What is known of the weights as they are now; empty where that is nothing."""
        return self.results if self.evaluated_step == self.step else {}

    def is_done(self, *, epochs: int | None, steps: int | None) -> bool:
        """Whether the goal is reached, or somebody said stop."""
        return (
            self.stop_reason is not None
            or (steps is not None and self.step >= steps)
            or (epochs is not None and self.epochs_done >= epochs)
        )

    def describe_end(self, *, epochs: int | None, steps: int | None) -> str:
        """Say that nothing is left to do, and what would prolong a run that has come to its end."""
        if self.stop_reason is not None:
            why, more = self.stop_reason, "allow more of them"
        elif steps is not None and self.step >= steps:
            why, more = format_done(self.step, steps, "steps"), "raise steps"
        else:
            why, more = format_done(self.epochs_done, epochs, "epochs"), "raise epochs"
        return (
            f"nothing is left to do: {why}; {more} to train on, or give another run directory to "
            "begin anew"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "step": self.step,
            "epochs_done": self.epochs_done,
            "samples": self.samples,
            "seq": self.seq,
            "results": dict(self.results),
            "evaluated_step": self.evaluated_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved values."""
        self.step = self.began_at = int(state["step"])
        self.epochs_done = int(state["epochs_done"])
        self.samples = self.began_with = int(state["samples"])
        self.seq = int(state["seq"])
        self.results = {str(name): float(value) for name, value in state["results"].items()}
        evaluated = state["evaluated_step"]
        self.evaluated_step = None if evaluated is None else int(evaluated)
