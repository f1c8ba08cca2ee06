"""What a disturbed training must have left: the right samples, once each, and the right weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.chaos.damage import valid_checkpoints
from hpctrain.checkpoint import read_checkpoint
from hpctrain.errors import CheckpointError

__all__ = [
    "AttemptLog",
    "check_samples",
    "compare_ends",
    "stitch",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptLog:
    """What the ranks of one attempt have written down."""

    from_step: int
    """The step of the checkpoint it resumed from; 0: it started from scratch."""
    steps: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """The epoch and the samples, over all ranks, of each step."""


def stitch(attempts: Sequence[AttemptLog]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """The steps that the last attempt's weights are made of: later ones were lost, and made again.

    Args:
        attempts: In the order in which they ran; those that never began to train are left out.
    """
    lineage: dict[int, tuple[int, tuple[int, ...]]] = {}
    for attempt in attempts:
        lineage = {step: done for step, done in lineage.items() if step <= attempt.from_step}
        lineage.update(attempt.steps)
    return lineage


def check_samples(
    lineage: Mapping[int, tuple[int, tuple[int, ...]]],
    *,
    num_steps: int,
    num_epochs: int,
    num_samples: int,
) -> list[str]:
    """What is wrong with a lineage; empty: every sample of every epoch exactly once."""
    wrong = []
    missing = [step for step in range(1, num_steps + 1) if step not in lineage]
    if missing or len(lineage) != num_steps:
        wrong.append(f"{len(lineage)} steps instead of {num_steps}, without {missing[:5]}")
    seen: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(num_epochs)}
    for epoch, samples in lineage.values():
        seen.setdefault(epoch, Counter()).update(samples)
    for epoch, counts in seen.items():
        absent = sum(1 for sample in range(num_samples) if counts[sample] == 0)
        again = sum(1 for count in counts.values() if count > 1)
        strange = len(set(counts) - set(range(num_samples)))
        if absent or again or strange or epoch >= num_epochs:
            wrong.append(f"epoch {epoch}: {absent} samples missing, {again} seen more than once")
    return wrong


def compare_ends(one: Path, other: Path, *, tolerance: float) -> str | None:
    """How the models in the newest checkpoints of two directories differ; None: they are equal.

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
