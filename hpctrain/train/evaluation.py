"""A model measured on data it was not trained on: over all ranks, every sample once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from hpctrain import metrics as exact
from hpctrain.data import Loader
from hpctrain.optim import EMA, SyncBatchNorm, average_batchnorm
from hpctrain.replica import Replica
from hpctrain.train.computing import compute
from hpctrain.world import World

__all__ = ["evaluate"]


def evaluate(
    replica: Replica,
    loader: Loader,
    loss: Callable[..., Tensor] | None,
    metrics: Mapping[str, Callable[..., Tensor]],
    *,
    ema: EMA | None = None,
    averaged: bool = True,
) -> dict[str, float]:
    """Collective: the mean loss and metrics over the samples of all ranks; all must match.

    Every sample counts once, whatever the number of ranks; sums are exact, rounded once.

    Args:
        replica: The model.
        loader: The data.
        loss: The mean over a batch of what the model returns and what is wanted; None: the model
            returns its loss itself.
        metrics: One value a sample of what the model returns and what is wanted.
        ema: The average of the model's weights, where there is one.
        averaged: Whether it is the average that is evaluated, or the last weights.

    Raises:
        ConfigError: on all ranks, when there are no samples.
    """
    world, model = replica.world, replica.model
    sums = {name: exact.Mean() for name in ("loss", *metrics)}
    if world.size > 1 and any(_has_own_statistics(layer) for layer in model.modules()):
        _average_statistics(world, model, ema)  # all ranks must evaluate one and the same model
    swapped = ema.swapped_in() if ema is not None and averaged else nullcontext()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), swapped:
            for batch in loader:
                if loader.num_samples == 0:
                    continue
                made = compute(replica, model, batch, loss)
                sums["loss"].update(made.loss, loader.num_samples)
                for name, metric in metrics.items():
                    sums[name].update(metric(made.out, made.wanted))
    finally:
        model.train(was_training)
    return {name: total.value(world) for name, total in sums.items()}


def _average_statistics(world: World, model: nn.Module, ema: EMA | None) -> None:
    """Collective: average the statistics of BatchNorm over ranks, and their averages over steps."""
    average_batchnorm(world, model)
    if ema is not None:
        with ema.swapped_in():
            average_batchnorm(world, model)
            for name, buffer in model.named_buffers():
                if name in ema.averages:
                    ema.averages[name].copy_(buffer)


def _has_own_statistics(layer: nn.Module) -> bool:
    """Whether it is a BatchNorm that each rank feeds with its own batches."""
    batchnorms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    shared = isinstance(layer, SyncBatchNorm)
    return isinstance(layer, batchnorms) and not shared and layer.running_mean is not None
