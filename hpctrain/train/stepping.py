"""The step of a model on a batch: what most trainings do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.train.computing import Computed, compute
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.train.trainer import Trainer

__all__ = ["supervised"]


def supervised(trainer: Trainer, batch: Any) -> Tensor:
    """Collective: one step of a model on a batch, with the trainer's loss or the model's own."""
    replica, num_samples = trainer.replica, trainer.loader.num_samples
    if trainer.has_stepped:
        made = compute(replica, replica.model, batch, trainer.loss)
    else:
        made = _compute_first(trainer, batch)
    replica.backward(made.loss, num_samples=num_samples)
    trainer.update(next(iter(trainer.replicas)))
    return made.loss.detach()


def _compute_first(trainer: Trainer, batch: Any) -> Computed:
    """Collective: the first batch of a job shows whether model, data and loss fit together."""
    made, trouble = None, None
    try:
        made = compute(trainer.replica, trainer.replica.model, batch, trainer.loss)
    except ConfigError as error:
        trouble = str(error)
    with trainer.refusing():
        agree(trainer.world.comm, trouble, error=ConfigError)
    if made is None:
        raise ConfigError("the first batch was refused")  # agree has raised what is wrong
    return made
