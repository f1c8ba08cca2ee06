"""What users are told about their model and about attributes that a replica has not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.tensor_names import plain_name

__all__ = ["explain_missing", "own_statistics"]


def explain_missing(attributes: Mapping[str, Any], name: str) -> str:
    """Why a replica has no such attribute, and whose it is."""
    text = f"'Replica' object has no attribute {name!r}"
    for owner in ("model", "optimizer"):
        if owner in attributes and hasattr(attributes[owner], name):
            return f"{text}; it is the {owner}'s: use replica.{owner}.{name}"
    return text


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
