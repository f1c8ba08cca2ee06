"""The step of a model on inputs and what is wanted of it: what most trainings do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.train.evaluation import split_batch

if TYPE_CHECKING:
    from hpctrain.train.trainer import Trainer

__all__ = ["supervised"]


def supervised(trainer: Trainer, batch: Any) -> Tensor:
    """Collective: one step of a model on inputs and what is wanted of it."""
    replica, num_samples = trainer.replica, trainer.loader.num_samples
    inputs, wanted = split_batch(batch)
    if trainer.loss is None:
        raise ConfigError("Trainer needs a loss; without one, a step function")
    loss = trainer.loss(replica(*inputs), wanted)
    replica.backward(loss, num_samples=num_samples)
    trainer.update(next(iter(trainer.replicas)))
    return loss.detach()
