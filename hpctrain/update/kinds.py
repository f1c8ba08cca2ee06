"""Which optimizers may be divided, and how. Pure.

Most of torch's optimizers treat every element alone, so any piece of a parameter can be updated
apart. Some look at a whole parameter (a norm, a matrix): those are divided by whole parameters. One
that couples parameters cannot be divided. A class of one's own says which it is by an attribute:
`shards_by = "element"` or `"parameter"`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.errors import ConfigError

__all__ = ["refuse_fused_complex", "shards_by"]

_BY_ELEMENT = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_BY_PARAMETER = ("Adafactor", "Muon")


def shards_by(optimizer: torch.optim.Optimizer) -> tuple[str | None, str]:
    """`element`, `parameter` or None, and why.

    Raises:
        ConfigError: a class says what is unknown.
    """
    kind = type(optimizer)
    told = getattr(kind, "shards_by", None)
    if told in ("element", "parameter"):
        return str(told), f"{kind.__name__} says that it can be divided by {told}"
    if told is not None:
        raise ConfigError(
            f"{kind.__name__}.shards_by={told!r} is unknown; choose 'element', 'parameter' or None"
        )
    if f"{kind.__module__}.".startswith("torch.optim."):
        if kind.__name__ in _BY_ELEMENT:
            return "element", f"{kind.__name__} treats every element alone"
        if kind.__name__ in _BY_PARAMETER:
            return "parameter", f"{kind.__name__} treats every parameter alone"
    return None, (
        f"{kind.__name__} is not known to treat elements or parameters alone (a class of your own "
        'can say so: shards_by = "element" or "parameter")'
    )


def refuse_fused_complex(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Refuse, on all ranks alike, what torch refuses where the piece is updated alone.

    Args:
        optimizer: With the gradients of the step.
        names: Of its parameters, in the order of its groups.

    Raises:
        ConfigError: a fused group is about to update a complex parameter.
    """
    fused = [bool(group.get("fused")) for group in optimizer.param_groups for _ in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, parameter, is_fused in zip(names, parameters, fused, strict=True):
        if is_fused and parameter.is_complex() and parameter.grad is not None:
            raise ConfigError(
                f"{name} is complex, and torch's fused {type(optimizer).__name__} takes real "
                "parameters alone; put it into a parameter group of its own with fused=False"
            )
