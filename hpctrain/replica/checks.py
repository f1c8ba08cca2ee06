"""What a user's own loop, model or call gets wrong, said by name; and what a call means. Pure.

What would make ranks silently different is refused here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.errors import ConfigError
from hpctrain.replica.window import Window
from hpctrain.tensor_names import plain_name

if TYPE_CHECKING:
    from hpctrain.replica.modes import Mode

__all__ = [
    "check_closure",
    "check_empty_loss",
    "check_finished",
    "check_gradients",
    "check_learning",
    "check_loss",
    "check_not_in_backward",
    "check_open",
    "check_plain",
    "check_state",
    "check_stepped",
    "check_unchanged",
    "check_untouched",
    "count_samples",
    "explain_missing",
    "needs_closure",
    "own_statistics",
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


def check_open(*, is_closed: bool, has_ended: bool) -> None:
    """Refuse to train with a replica that has released its model.

    Args:
        is_closed: Whether it has.
        has_ended: Whether it has because its world ended.

    Raises:
        ConfigError: with what to do.
    """
    if not is_closed:
        return
    if has_ended:
        raise ConfigError(
            "this replica is closed, since its world is closed: do this inside "
            "`with hpctrain.init() as world:`, or evaluate with replica.model under torch.no_grad()"
        )
    raise ConfigError(
        "this replica is closed (close() was called); distribute() the model again to continue "
        "training, or evaluate with replica.model under torch.no_grad()"
    )


def check_untouched(mode: Mode) -> None:
    """Refuse gradients that are gone at the end of the very pass that has made them.

    Raises:
        ConfigError: with what to do.
    """
    if mode.has_none():
        raise ConfigError(
            "backward computed gradients, but none is left at its end: a hook set them to None, "
            f"perhaps after an update by another optimizer; {_AFTER_BACKWARD}"
        )


# Backward passes and steps


def check_unchanged(window: Window) -> None:
    """Refuse parameters that were added or changed during a step."""
    if window.calls:
        raise ConfigError(
            "parameters were added or converted in the middle of a step; do it after replica.step()"
        )


def check_gradients(mode: Mode, window: Window) -> None:
    """Refuse gradients that this replica did not compute, or that were edited before the exchange.

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
            "the last backward of the step (replica.zero_grad() starts the step over)"
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
            f"a backward pass was interrupted by {window.broken}; call replica.zero_grad() and "
            "continue with the next batch instead of stepping"
        )
    if is_open:
        raise ConfigError(
            "gradients of the last loss.backward() were not exchanged: an exception interrupted "
            "it (call replica.zero_grad() and continue with the next batch), or the whole model is "
            "inside a reentrant activation checkpoint (pass use_reentrant=False to "
            "torch.utils.checkpoint, or call replica.backward(loss))"
        )


def check_plain(window: Window, *, scales: bool, watched: bool, refusal: str = "") -> None:
    """Refuse `loss.backward()` if it conflicts with the options of `distribute`.

    Args:
        window: Since the last step.
        scales: Whether losses are to be scaled.
        watched: Whether the pass begins with this call.
        refusal: Why the mode cannot have it.

    Raises:
        ConfigError: with what to call instead.
    """
    if refusal:
        raise ConfigError(refusal)
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


# `replica.learn`


def check_learning(loss_fn: object, batch: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Refuse a call that has no loss function, no input or no target.

    Raises:
        ConfigError: with how it is called.
    """
    if not callable(loss_fn):
        raise ConfigError(
            f"learn: the first argument is a {type(loss_fn).__name__}, and must be the loss "
            "function; call replica.learn(loss_fn, x, y), or replica.backward(loss) with a loss"
        )
    if len(batch) < (1 if named else 2):
        raise ConfigError(
            f"learn: {len(batch)} positional arguments follow the loss function, and the model's "
            "inputs and the target are needed; call replica.learn(loss_fn, x, y), with None as the "
            "target where the loss needs none"
        )


def count_samples(target: object) -> int | None:
    """How many samples a target is for: its first dimension; None where it has none."""
    shape = getattr(target, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else None


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer evaluates the loss itself, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_closure(optimizer: str, *, accumulate: int, no_sync: bool, treats: bool) -> None:
    """Refuse what an optimizer that evaluates the loss several times a step cannot carry.

    Raises:
        ConfigError: with what to leave out.
    """
    what = None
    if accumulate > 1:
        what = f"accumulate={accumulate}"
    elif no_sync:
        what = "no_sync()"
    elif treats:
        what = "precision='fp16', clip_norm and clip_value"
    if what is not None:
        raise ConfigError(
            f"learn: {optimizer} evaluates one batch several times in a step, and {what} cannot go "
            "with that; leave it out, or use another optimizer"
        )


# Attributes, states and statistics


def explain_missing(attributes: Mapping[str, Any], name: str) -> str:
    """Why a replica has no such attribute, and whose it is."""
    text = f"'Replica' object has no attribute {name!r}"
    for owner in ("model", "optimizer"):
        if owner in attributes and hasattr(attributes[owner], name):
            return f"{text}; it is the {owner}'s: use replica.{owner}.{name}"
    return text


def check_state(state: Mapping[str, Any]) -> None:
    """Refuse a state that is neither a replica's nor an optimizer's.

    Raises:
        ConfigError: with the keys that it has.
    """
    if "param_groups" not in state or "state" not in state:
        found = ", ".join(map(str, list(state)[:3]))
        raise ConfigError(
            f"this is not the state of a replica: it has {found or 'nothing'}, and not 'state' and "
            "'param_groups'; a model's state goes to replica.model.load_state_dict(state)"
        )


def own_statistics(model: torch.nn.Module, size: int) -> list[tuple[str, str]]:
    """A row for models with running statistics, which are never exchanged; none for others."""
    found = [
        plain_name(name) or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(getattr(module, "running_mean", None), torch.Tensor)
        and "SyncBatchNorm" not in type(module).__name__  # torch's, and that of `sync_batchnorm`
    ]
    if size == 1 or not found:
        return []
    shown = ", ".join(found[:2]) + (f" and {len(found) - 2} more" if len(found) > 2 else "")
    text = (
        f"running statistics of {shown} are each rank's own; evaluate and save on one rank, "
        "call average_batchnorm before, or share them by sync_batchnorm"
    )
    return [("BatchNorm", text)]


def check_loss(loss: object) -> None:
    """Refuse what cannot be differentiated. Pure.

    Raises:
        ConfigError: it is not a tensor, not one number, or has no graph.
    """
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"backward: the loss is a {type(loss).__name__} ({loss!r}), and must be the tensor "
            "returned by the loss function, before .item() or float()"
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"the loss has shape {tuple(loss.shape)}; reduce it to one number, a mean over the "
            "samples"
        )
    if not loss.requires_grad:
        raise ConfigError(
            "backward: the loss has no graph to differentiate: it was computed under "
            "torch.no_grad() or inference_mode(), was detached, or depends on frozen parameters "
            "alone; compute it with gradients enabled, from parameters with requires_grad=True"
        )


def check_empty_loss(loss: object) -> None:
    """Refuse a loss that no model was run for, where every rank must run it. Pure.

    Raises:
        ConfigError: with what to do.
    """
    if not (isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1):
        raise ConfigError(
            "num_samples=0 with a sharded model: the other ranks gather its parameters in their "
            "passes, and this one must as well; run the model on a batch of no rows (or any rows) "
            "and give the loss of that: it counts nothing"
        )
