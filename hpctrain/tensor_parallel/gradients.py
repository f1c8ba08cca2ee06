"""Gradients of a divided model over the whole grid: averaged over data, one norm for all."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.engines import Op
from hpctrain.grid import Grid
from hpctrain.tables import number_of, positive

__all__ = ["average_gradients", "clip_gradients"]


def average_gradients(grid: Grid, model: nn.Module, *, weight: float = 1.0) -> None:
    """Collective: average all gradients over the data dimension, weighted, such as by samples.

    A parameter that some ranks have used counts as zero on the others; one that no rank has used
    keeps None.
    """
    number_of(weight, "weight")
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine = grid.engine("data")
    facts = torch.tensor(
        [weight, *(float(p.grad is not None) for p in parameters)],
        dtype=torch.float64,
        device=grid.world.device,
    )
    if engine.size > 1:
        engine.allreduce_(facts, Op.SUM, what="weights and use of gradients")
    total = positive(float(facts[0]), "the sum of weights")
    for parameter, used in zip(parameters, facts[1:].tolist(), strict=True):
        if not used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local = _local(parameter.grad)
        local.mul_(weight / total)
        if engine.size > 1:
            engine.allreduce_(local, Op.SUM, what="gradients")


def clip_gradients(grid: Grid, model: nn.Module, max_norm: float) -> Tensor:
    """Collective: limit the norm of all gradients together; torch refuses mixed meshes.

    Returns:
        The norm before; the same on all ranks.
    """
    positive(max_norm, "max_norm")
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    sums = torch.zeros(2, dtype=torch.float64, device=grid.world.device)  # divided, whole
    for gradient in gradients:
        sums[0 if _is_divided(gradient) else 1] += _local(gradient).double().square().sum()
    divided = sums[:1].clone()
    engine = grid.engine("tensor")
    if engine.size > 1:
        engine.allreduce_(divided, Op.SUM, what="the norm of divided gradients")
    norm = (divided[0] + sums[1]).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = _local(gradient)
        local.mul_(factor.to(local.dtype))
    return norm


def _local(gradient: Tensor) -> Tensor:
    return cast("Any", gradient)._local_tensor if isinstance(gradient, DTensor) else gradient


def _is_divided(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and gradient.placements[0].is_shard()
