"""Whether a checkpoint's optimizer is the one of this script. Pure.

torch loads the state of any optimizer into any other: the checkpoint's options win without a word,
and what the new one needs is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.optim import label_of

__all__ = ["changed_options", "identify", "trouble_with"]

_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""What schedules change while a run goes on; what the rate began with is in `initial_lr` then."""
_RECIPE = "rate_ratio"
"""In groups whose rate is a recipe's: it compares itself, and the optimizer's own means nothing."""


def identify(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer is called in checkpoints."""
    return label_of(optimizer)


def trouble_with(saved: str, optimizer: torch.optim.Optimizer) -> str | None:
    """Why a state cannot be this optimizer's, or None."""
    own = identify(optimizer)
    if saved == own:
        return None
    return (
        f"it has the state of {saved}, and this run's optimizer is {own}; go on with {saved}, or "
        "begin a run in another directory"
    )


def changed_options(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[str]:
    """Options of groups that the script sets otherwise than the checkpoint, in words.

    Args:
        saved: The optimizer's state in the checkpoint.
        optimizer: As the script has made it.
    """
    changes = []
    for index, (was, now) in enumerate(
        zip(saved["param_groups"], optimizer.param_groups, strict=False)
    ):
        for key in sorted((was.keys() & now.keys()) - _moving(was, now)):
            if not _same(was[key], now[key]):
                where = f" of group {index}" if len(optimizer.param_groups) > 1 else ""
                changes.append(f"{key}{where} {was[key]!r} (the script says {now[key]!r})")
    return changes


def _moving(was: Mapping[str, Any], now: Mapping[str, Any]) -> frozenset[str]:
    """Options whose value says nothing, besides the list of parameters."""
    if _RECIPE in was or _RECIPE in now:
        return _SCHEDULED | {"params", "initial_lr"}
    scheduled = "initial_lr" in was or "initial_lr" in now
    return (_SCHEDULED if scheduled else frozenset()) | {"params"}


def _same(was: object, now: object) -> bool:
    if isinstance(was, torch.Tensor) or isinstance(now, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(was), torch.as_tensor(now)))
    return was == now
