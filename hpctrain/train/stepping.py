"""The step of a model on a batch: what most trainings do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.train.computing import arrange
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.train.trainer import Trainer

__all__ = ["supervised"]


def supervised(trainer: Trainer, batch: Any) -> Tensor | None:
    """Collective: one step of a model on a batch, with the trainer's loss or the model's own."""
    prepare = arrange if trainer.has_stepped else _on_first(trainer, arrange)
    inputs, named, target, loss = prepare(batch, trainer.replica.model, trainer.loss)
    step = trainer.replica.learn(
        loss if trainer.has_stepped else _on_first(trainer, loss, last=True),
        *inputs,
        target,
        num_samples=trainer.loader.num_samples,
        **named,
    )
    trainer.advance(next(iter(trainer.replicas)), step)
    return step.loss


def _on_first(
    trainer: Trainer, call: Callable[..., Any], *, last: bool = False
) -> Callable[..., Any]:
    """The same call on the first batch of a job, which shows whether model, data and loss fit.

    Collective where it fails on some rank, and where it is the last one: all ranks refuse together.
    """

    def checked(*arguments: Any) -> Any:
        made, trouble = None, None
        try:
            made = call(*arguments)
        except ConfigError as error:
            trouble = str(error)
        if last or trouble is not None:
            with trainer.refusing():
                agree(trainer.world.comm, trouble, error=ConfigError)
        return made

    return checked
