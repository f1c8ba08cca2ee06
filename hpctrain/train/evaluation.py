"""A model measured on data it was not trained on: over all ranks, every sample once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.data import metrics as exact
from hpctrain.data.loader import Loader
from hpctrain.errors import ConfigError
from hpctrain.optim import SyncBatchNorm, average_batchnorm
from hpctrain.replica import Replica

__all__ = ["evaluate", "split_batch"]


def split_batch(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """The inputs of a batch, and what is wanted: its last part.

    Raises:
        ConfigError: the batch has no parts.
    """
    parts = tuple(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(parts, tuple | list) or len(parts) < 2:
        raise ConfigError(
            f"a batch is a {type(batch).__name__}, and inputs and what is wanted are needed; give "
            "data of at least two parts, or a step function (train.step) that knows better"
        )
    return tuple(parts[:-1]), parts[-1]


def evaluate(
    replica: Replica,
    loader: Loader,
    loss: Callable[..., Tensor],
    metrics: Mapping[str, Callable[..., Tensor]],
) -> dict[str, float]:
    """Collective: the mean loss and metrics over the samples of all ranks; all must match.

    Every sample counts once, whatever the number of ranks; sums are exact, rounded once.

    Args:
        replica: The model.
        loader: The data.
        loss: The mean over a batch of what the model returns and what is wanted.
        metrics: One value a sample, likewise.

    Raises:
        ConfigError: on all ranks, when there are no samples.
    """
    world, model = replica.world, replica.model
    sums = {name: exact.Mean() for name in ("loss", *metrics)}
    if world.size > 1 and any(_has_own_statistics(layer) for layer in model.modules()):
        average_batchnorm(world, model)  # all ranks must evaluate one and the same model
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in loader:
                if loader.num_samples == 0:
                    continue
                inputs, wanted = split_batch(batch)
                out = replica(*inputs)
                sums["loss"].update(loss(out, wanted), loader.num_samples)
                for name, metric in metrics.items():
                    sums[name].update(metric(out, wanted))
    finally:
        model.train(was_training)
    return {name: total.value(world) for name, total in sums.items()}


def _has_own_statistics(layer: nn.Module) -> bool:
    """Whether it is a BatchNorm that each rank feeds with its own batches."""
    batchnorms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    shared = isinstance(layer, SyncBatchNorm)
    return isinstance(layer, batchnorms) and not shared and layer.running_mean is not None
