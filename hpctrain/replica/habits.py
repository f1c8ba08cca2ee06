"""Habits of a user's own loop that would make ranks silently different: refused by name."""

from __future__ import annotations

from hpctrain.errors import ConfigError
from hpctrain.replica.mode import Mode
from hpctrain.replica.window import Window

__all__ = ["check_finished", "check_gradients", "check_unchanged"]


def check_unchanged(window: Window) -> None:
    """Refuse parameters that came or changed while a step is under way."""
    if window.calls:
        raise ConfigError(
            "parameters were added or converted in the middle of a step; do it after replica.step()"
        )


def check_gradients(mode: Mode, window: Window) -> None:
    """Refuse gradients that this replica did not make, or that were edited before they travelled.

    Raises:
        ConfigError: with the parameters concerned, and what to do instead.
    """
    foreign = mode.foreign()
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign[:3])} got gradients from a backward call that this replica did "
            "not make; call replica.backward(loss) instead of loss.backward(), or "
            "replica.zero_grad() to forget them (another model's loss that went through here)"
        )
    in_the_middle = window.calls > 0 and not window.exchanged
    if in_the_middle and mode.edited():
        raise ConfigError(
            f"gradients were changed between backward calls {window.calls} and {window.calls + 1} "
            "of one step, before they were averaged over the ranks; clip, zero or edit them after "
            "the last backward of the step (replica.zero_grad() begins the step anew)"
        )


def check_finished(window: Window) -> None:
    """Refuse to step with what an interrupted backward pass has left."""
    if window.broken:
        raise ConfigError(
            f"a backward pass was interrupted by {window.broken}; call replica.zero_grad() and go "
            "on with the next batch instead of stepping"
        )
