"""What of a model lies in shards, and the mark of one whose state alone does.

Of a model that was split with `shard="state"` every rank has all weights: nothing about the model
itself changes, and `distribute` divides the update.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

__all__ = ["SHARDED", "ShardKind", "divides_state", "mark_state_divided"]

ShardKind = Literal["state", "gradients", "parameters"]
SHARDED: tuple[ShardKind, ...] = ("state", "gradients", "parameters")

_ATTRIBUTE = "_hpctrain_divides_state"


def mark_state_divided(model: nn.Module) -> None:
    """Let `distribute` divide the state of this model's optimizer."""
    model.__dict__[_ATTRIBUTE] = True


def divides_state(model: nn.Module) -> bool:
    """Whether `split` was asked to divide the state of the model's optimizer, and no more."""
    return bool(model.__dict__.get(_ATTRIBUTE, False))
