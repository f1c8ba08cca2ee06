"""Habits of a user's own loop that would make ranks silently different: refused by name."""

from __future__ import annotations

import torch

from hpctrain.errors import ConfigError
from hpctrain.replica.modes import Mode
from hpctrain.replica.window import Window

__all__ = [
    "check_finished",
    "check_gradients",
    "check_not_in_backward",
    "check_plain",
    "check_stepped",
    "check_unchanged",
    "check_untouched",
]

_AFTER_BACKWARD = (
    "gradients are averaged over the ranks when backward ends, so an update inside it would use "
    "this rank's own; call optimizer.step() after backward has returned, and remove the hook "
    "(register_post_accumulate_grad_hook)"
)


def check_not_in_backward() -> None:
    """Refuse a step in a hook of a backward pass that still runs.

    Raises:
        ConfigError: with what to do.
    """
    if torch._C._current_autograd_node() is not None:
        raise ConfigError(f"a step was called inside a backward pass: {_AFTER_BACKWARD}")


def check_untouched(mode: Mode) -> None:
    """Refuse gradients that are gone at the end of the very pass that has made them.

    Raises:
        ConfigError: with what to do.
    """
    if mode.has_none():
        raise ConfigError(
            "backward has made gradients, and none is left at its end: a hook has set them to "
            f"None, perhaps after an update by another optimizer; {_AFTER_BACKWARD}"
        )


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
    foreign = mode.watch.foreign()
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign[:3])} got gradients that were not exchanged: from "
            "another replica's loss, which went through this model, or from loss.backward() in a "
            "loop that has called replica.backward(loss) before; call replica.zero_grad() to drop "
            "them, and then replica.backward(loss), or loss.backward() alone"
        )
    in_the_middle = window.calls > 0 and not window.exchanged
    if in_the_middle and mode.watch.edited():
        raise ConfigError(
            f"gradients were changed between backward calls {window.calls} and {window.calls + 1} "
            "of one step, before they were averaged over the ranks; clip, zero or edit them after "
            "the last backward of the step (replica.zero_grad() begins the step anew)"
        )


def check_finished(window: Window, *, is_open: bool = False) -> None:
    """Refuse to step with what an unfinished backward pass has left.

    Args:
        window: Where a pass of `replica.backward` notes that it was interrupted.
        is_open: Whether a `loss.backward()` has begun and not ended.

    Raises:
        ConfigError: with what to do.
    """
    if window.broken:
        raise ConfigError(
            f"a backward pass was interrupted by {window.broken}; call replica.zero_grad() and go "
            "on with the next batch instead of stepping"
        )
    if is_open:
        raise ConfigError(
            "gradients of the last loss.backward() were not exchanged: an exception interrupted "
            "it (call replica.zero_grad() and go on with the next batch), or the whole model is "
            "inside a reentrant activation checkpoint (pass use_reentrant=False to "
            "torch.utils.checkpoint, or call replica.backward(loss))"
        )


def check_plain(window: Window, *, scales: bool, watched: bool) -> None:
    """Refuse `loss.backward()` where it cannot mean what was asked of `distribute`.

    Args:
        window: Since the last step.
        scales: Whether losses are to be scaled.
        watched: Whether the pass begins with this call.

    Raises:
        ConfigError: with what to call instead.
    """
    if scales:
        raise ConfigError(
            "precision='fp16' scales the loss in replica.backward(loss); call that instead of "
            "loss.backward(), or leave precision out of distribute and use your own GradScaler"
        )
    if window.accumulate > 1:
        raise ConfigError(
            f"accumulate={window.accumulate} counts calls of replica.backward(loss); call that "
            "instead of loss.backward(), or leave accumulate out of distribute and make all but "
            "the last call of a step under `with replica.no_sync():`"
        )
    if watched and window.broken:
        check_finished(window)


def check_stepped(window: Window, *, by_hand: bool) -> None:
    """Refuse `optimizer.step()` with gradients that are this rank's own.

    Raises:
        ConfigError: with what to do.
    """
    if window.calls and not window.exchanged:
        raise ConfigError(
            f"optimizer.step() with gradients of {window.calls} backward calls that were never "
            "exchanged (no_sync(), or a window of accumulate= that is not full); make the last "
            "backward call of a step outside no_sync(), or call replica.synchronize() first"
        )
    if by_hand:
        raise ConfigError(
            "optimizer.step() with gradients that no backward call of this step has made "
            "(assigned by hand, or left from before distribute): they were never averaged over "
            "the ranks; call replica.synchronize() before the step, or zero_grad() to drop them"
        )
