"""What users are told about their model, and about attributes and states that are none. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.errors import ConfigError
from hpctrain.tensor_names import plain_name

__all__ = ["check_state", "explain_missing", "own_statistics"]


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
            f"this is no state of a replica: it has {found or 'nothing'}, and not 'state' and "
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
