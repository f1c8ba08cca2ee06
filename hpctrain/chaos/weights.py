"""Whether two runs ended with the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hpctrain.chaos.damage import valid_checkpoints
from hpctrain.checkpoint import read_checkpoint
from hpctrain.errors import CheckpointError

__all__ = ["compare_ends"]


def compare_ends(one: Path, other: Path, *, tolerance: float) -> str | None:
    """How the models in the newest checkpoints of two directories differ; None: they are alike.

    Args:
        one: A directory of checkpoints.
        other: Another.
        tolerance: Largest difference in proportion to a tensor's largest number; 0: bit for bit.
    """
    (steps, left), (other_steps, right) = _end(one), _end(other)
    if steps != other_steps:
        return f"it ended at step {other_steps} instead of {steps}"
    for name, tensor in left.items():
        if not _alike(tensor, right[name], tolerance):
            return f"the weights differ, first in {name}"
    return None


def _end(directory: Path) -> tuple[int, dict[str, Tensor]]:
    entries = valid_checkpoints(directory)
    if not entries:
        raise CheckpointError(f"{directory} has no valid checkpoint")
    state = read_checkpoint(entries[-1].path)
    models = {part: tree for part, tree in state.items() if part.split(".")[-1] == "model"}
    tensors = {f"{p}.{name}": tensor for p, tree in models.items() for name, tensor in tree.items()}
    return entries[-1].step, tensors


def _alike(left: Tensor, right: Tensor, tolerance: float) -> bool:
    if tolerance == 0 or not left.is_floating_point() or left.numel() == 0:
        return torch.equal(_bytes(left), _bytes(right))
    difference = (left.double() - right.double()).abs().max().item()
    return difference <= tolerance * left.double().abs().max().item()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
