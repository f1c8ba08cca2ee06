"""Cross-entropy of scores whose classes are divided over ranks: no rank has all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from hpctrain.errors import ConfigError

__all__ = ["vocabulary_cross_entropy"]


def vocabulary_cross_entropy(
    scores: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Collective over the tensor dimension: `cross_entropy` of scores that stay divided.

    Each rank keeps its classes; three numbers for each sample travel.

    Args:
        scores: (..., classes), as a model with a `vocabulary` layer at its end gives them; a plain
            tensor is taken as it is.
        target: (...), the classes.
        ignore_index: As in torch.
        reduction: `mean`, `sum` or `none`, as in torch.

    Raises:
        ConfigError: shapes that do not fit, an unknown reduction, or a target that is no class.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    if scores.shape[:-1] != target.shape:
        raise ConfigError(
            f"scores of shape {tuple(scores.shape)} need targets of shape "
            f"{tuple(scores.shape[:-1])}, not {tuple(target.shape)}"
        )
    if not isinstance(scores, DTensor):
        flat = scores.reshape(-1, scores.shape[-1])
        lost = functional.cross_entropy(
            flat, target.reshape(-1), ignore_index=ignore_index, reduction=reduction
        )
        return lost.reshape(target.shape) if reduction == "none" else lost
    if scores.placements[0] != Shard(scores.dim() - 1):
        raise ConfigError(f"scores lie as {scores.placements}, and must be divided by classes")
    kept = target != ignore_index
    if bool((kept & ((target < 0) | (target >= scores.shape[-1]))).any()):
        raise ConfigError(f"targets must be within {scores.shape[-1]} classes")
    mesh: Any = scores.device_mesh
    losses: Tensor = _Divided.apply(  # type: ignore[no-untyped-call]
        scores.to_local(), target, kept, mesh.get_local_rank(), mesh.get_group()
    )
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / kept.sum()


class _Divided(torch.autograd.Function):
    """Losses of all samples from this rank's classes."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, target: Tensor, kept: Tensor, rank: int, group: Any
    ) -> Tensor:
        exact = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        largest = exact.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = exact - largest.unsqueeze(-1)
        powers = shifted.exp()
        place = target - rank * scores.shape[-1]
        here = kept & (place >= 0) & (place < scores.shape[-1])
        place = place.clamp(0, scores.shape[-1] - 1).unsqueeze(-1)
        own = shifted.gather(-1, place).squeeze(-1).masked_fill(~here, 0.0)
        sums = torch.stack([powers.sum(-1), own])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(powers / sums[0].unsqueeze(-1), place, here, kept)
        ctx.dtype = scores.dtype
        return (sums[0].log() - sums[1]).masked_fill(~kept, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        chances, place, here, kept = ctx.saved_tensors
        one = torch.zeros_like(chances).scatter_(-1, place, here.unsqueeze(-1).to(chances.dtype))
        scale = gradient.masked_fill(~kept, 0.0).unsqueeze(-1)
        return ((chances - one) * scale).to(ctx.dtype), None, None, None, None
