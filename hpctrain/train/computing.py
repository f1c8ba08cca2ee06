"""What a model makes of a batch: outputs and loss; a step of it; an evaluation over all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain import metrics as exact
from hpctrain.data import Loader
from hpctrain.errors import ConfigError
from hpctrain.optim import EMA, SyncBatchNorm, average_batchnorm
from hpctrain.sharding import sharding_of
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.grid import Grid
    from hpctrain.replica import Replica
    from hpctrain.train.trainer import Trainer
    from hpctrain.world import World

__all__ = [
    "MAIN",
    "Computed",
    "arrange",
    "compute",
    "evaluate",
    "prediction_of",
    "split_batch",
    "supervised",
]

MAIN = "model"
"""The model's name if there is only one."""
_LABELS = "labels"
"""The name of the target in transformers, anywhere in a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """A forward pass."""

    loss: Tensor
    out: Any
    """What the model returned."""
    target: Any
    """The target."""


def compute(
    forward: Callable[..., Any],
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None,
) -> Computed:
    """Run a model on a batch and take the loss.

    With a loss function, the inputs go to the model and the function compares what it returns with
    the target. Without one, the whole batch goes to the model, which returns its loss itself.

    Args:
        forward: What is called: a replica, or the model.
        model: Whose `forward` says which names it takes.
        batch: A tuple or list of parts, or a mapping of named ones.
        loss: The mean over samples of what the model returns and the target, or None.

    Raises:
        ConfigError: the batch cannot be split or passed, or the model returns no loss.
    """
    inputs, named, target, compare = arrange(batch, model, loss)
    out = forward(*inputs, **named)
    return Computed(loss=compare(out, target), out=out, target=target)


def arrange(
    batch: Any, model: nn.Module, loss: Callable[..., Tensor] | None
) -> tuple[tuple[Any, ...], dict[str, Any], Any, Callable[[Any, Any], Tensor]]:
    """Inputs by position and by name, the target, and what makes the loss of these. Pure.

    Raises:
        ConfigError: the batch cannot be split or passed.
    """
    if loss is not None:
        return *split_batch(batch, model), loss
    target = _target_of(batch)
    if isinstance(batch, Mapping):
        _check_names(model, batch)
        return (), dict(batch), target, _loss_in
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}, target, _loss_in


def split_batch(
    batch: Any, model: nn.Module | None = None
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The inputs of a batch, by position and by name, and the target.

    The target is the last part; of a mapping, `labels` where it has them. The other parts of a
    mapping go by name where the model takes all of these names, and in their order elsewhere.

    Raises:
        ConfigError: the batch has no parts.
    """
    if not isinstance(batch, Mapping | tuple | list) or len(batch) < 2:
        raise ConfigError(
            f"a batch is a {type(batch).__name__}, but an input and a target are required; give "
            "data of at least two parts, let the model return its loss and leave train.loss out, "
            "or write a step function (train.step)"
        )
    if not isinstance(batch, Mapping):
        return tuple(batch[:-1]), {}, batch[-1]
    last = _target_name(batch)
    inputs = {name: part for name, part in batch.items() if name != last}
    if model is not None and _takes(model, inputs):
        return (), inputs, batch[last]
    return tuple(inputs.values()), {}, batch[last]


def prediction_of(out: Any) -> Tensor:
    """The tensor that named losses and metrics compare: the output, or its `logits`.

    Raises:
        ConfigError: there is none.
    """
    found = out if isinstance(out, Tensor) else _entry(out, "logits")
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"the model returned {_describe(out)}; losses and metrics by name compare a tensor, or "
            "the logits of an output; use MODULE:FUNCTION, which gets what the model returned"
        )
    return found


def _target_name(batch: Mapping[str, Any]) -> str:
    return _LABELS if _LABELS in batch else list(batch)[-1]


def _target_of(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch[_target_name(batch)]
    return batch[-1] if isinstance(batch, tuple | list) else batch


def _entry(out: Any, name: str) -> Any:
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def _loss_in(out: Any, _target: Any) -> Tensor:
    found = out if isinstance(out, Tensor) else _entry(out, "loss")
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ConfigError(
            f"there is no train.loss, and the model returned {_describe(out)}; write a loss, as in "
            'loss = "cross_entropy", or let the model return an object or a dict with a scalar '
            "`loss` (transformers do when the batch has `labels`)"
        )
    half = found.dtype in (torch.float16, torch.bfloat16)
    return (found.float() if half else found).reshape(())


def _describe(out: Any) -> str:
    if isinstance(out, Tensor):
        return f"a tensor of shape {tuple(out.shape)}"
    if isinstance(out, Mapping):
        return f"{type(out).__name__} with {', '.join(map(str, out))}"
    return type(out).__name__


def _check_names(model: nn.Module, batch: Mapping[str, Any]) -> None:
    if not _takes(model, batch):
        raise ConfigError(
            f"a batch has {', '.join(map(str, batch))}, and the model's forward takes "
            f"{inspect.signature(model.forward)}; without train.loss all of a batch goes to the "
            "model by name: rename or drop columns, or write train.loss"
        )


def _takes(model: nn.Module, names: Collection[Any]) -> bool:
    """Whether `forward` can be called with these names and nothing else."""
    try:
        inspect.signature(model.forward).bind(**dict.fromkeys(names))
    except TypeError:
        return False
    return True


def supervised(trainer: Trainer, batch: Any) -> Tensor | None:
    """Collective: one step of a model on a batch, with the trainer's loss or the model's own."""
    prepare = arrange if trainer.has_stepped else _on_first(trainer, arrange)
    inputs, named, target, loss = prepare(batch, trainer.replica.model, trainer.loss)
    in_stages = trainer.grid is not None and trainer.grid.pipeline > 1  # the last stage has a loss
    step = trainer.replica.learn(
        loss if trainer.has_stepped or in_stages else _on_first(trainer, loss, last=True),
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


def evaluate(
    replica: Replica,
    loader: Loader,
    loss: Callable[..., Tensor] | None,
    metrics: Mapping[str, Callable[..., Tensor]],
    *,
    ema: EMA | None = None,
    averaged: bool = True,
    grid: Grid | None = None,
) -> dict[str, float]:
    """Collective: the mean loss and metrics over the samples of all ranks; all must match.

    Every sample counts once, whatever the number of ranks; sums are exact, rounded once.

    Args:
        replica: The model.
        loader: The data.
        loss: The mean over a batch of what the model returns and the target; None: the model
            returns its loss itself.
        metrics: One value a sample of what the model returns and the target.
        ema: The average of the model's weights, where there is one.
        averaged: Whether it is the average that is evaluated, or the last weights.
        grid: The grid that the model was divided on; each data coordinate counts once.

    Raises:
        ConfigError: on all ranks, when there are no samples.
    """
    world, model = replica.world, replica.model
    over = world if grid is None else grid
    gathers = sharding_of(model) is not None  # on all ranks, those without samples too
    sums = {name: exact.Mean() for name in ("loss", *metrics)}
    if world.size > 1 and any(_has_own_statistics(layer) for layer in model.modules()):
        _average_statistics(over, model, ema)  # all ranks must evaluate one and the same model
    swapped = ema.swapped_in() if ema is not None and averaged else nullcontext()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), swapped:
            for batch in loader:
                if loader.num_samples == 0:
                    if gathers:
                        inputs, named, _, _ = arrange(batch, model, loss)
                        replica(*inputs, **named)
                    continue
                made = compute(replica, model, batch, loss)
                sums["loss"].update(made.loss, loader.num_samples)
                for name, metric in metrics.items():
                    sums[name].update(metric(made.out, made.target))
    finally:
        model.train(was_training)
    return {name: total.value(over) for name, total in sums.items()}


def _average_statistics(over: World | Grid, model: nn.Module, ema: EMA | None) -> None:
    """Collective: average the statistics of BatchNorm over ranks, and their averages over steps."""
    average_batchnorm(over, model)
    if ema is not None:
        with ema.swapped_in():
            average_batchnorm(over, model)
            for name, buffer in model.named_buffers():
                if name in ema.averages:
                    ema.averages[name].copy_(buffer)


def _has_own_statistics(layer: nn.Module) -> bool:
    """Whether it is a BatchNorm that each rank feeds with its own batches."""
    batchnorms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    shared = isinstance(layer, SyncBatchNorm)
    return isinstance(layer, batchnorms) and not shared and layer.running_mean is not None
