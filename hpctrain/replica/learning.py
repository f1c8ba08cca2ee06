"""What `replica.learn` is given: a loss function and a batch; what an optimizer wants. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpctrain.errors import ConfigError

__all__ = ["check_closure", "check_learning", "count_samples", "needs_closure"]


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
