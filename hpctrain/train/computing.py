"""What a model makes of a batch: its outputs and the loss, by a function or by the model itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import ConfigError

__all__ = ["Computed", "arrange", "compute", "prediction_of", "split_batch"]

_LABELS = "labels"
"""What transformers call what is wanted, wherever it stands in a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """A forward pass."""

    loss: Tensor
    out: Any
    """What the model returned."""
    wanted: Any
    """What was wanted of it."""


def compute(
    forward: Callable[..., Any],
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None,
) -> Computed:
    """Run a model on a batch and take the loss.

    With a loss function, the inputs go to the model and the function compares what it returns with
    what is wanted. Without one, the whole batch goes to the model, which returns its loss itself.

    Args:
        forward: What is called: a replica, or the model.
        model: Whose `forward` says which names it takes.
        batch: A tuple or list of parts, or a mapping of named ones.
        loss: The mean over samples of what the model returns and what is wanted, or None.

    Raises:
        ConfigError: the batch cannot be split or passed, or the model returns no loss.
    """
    inputs, named, wanted, compare = arrange(batch, model, loss)
    out = forward(*inputs, **named)
    return Computed(loss=compare(out, wanted), out=out, wanted=wanted)


def arrange(
    batch: Any, model: nn.Module, loss: Callable[..., Tensor] | None
) -> tuple[tuple[Any, ...], dict[str, Any], Any, Callable[[Any, Any], Tensor]]:
    """Inputs by position and by name, what is wanted, and what makes the loss of these. Pure.

    Raises:
        ConfigError: the batch cannot be split or passed.
    """
    if loss is not None:
        return *split_batch(batch, model), loss
    wanted = _wanted_of(batch)
    if isinstance(batch, Mapping):
        _check_names(model, batch)
        return (), dict(batch), wanted, _loss_in
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}, wanted, _loss_in


def split_batch(
    batch: Any, model: nn.Module | None = None
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The inputs of a batch, by position and by name, and what is wanted.

    What is wanted is the last part; of a mapping, `labels` where it has them. The other parts of a
    mapping go by name where the model takes all of these names, and in their order elsewhere.

    Raises:
        ConfigError: the batch has no parts.
    """
    if not isinstance(batch, Mapping | tuple | list) or len(batch) < 2:
        raise ConfigError(
            f"a batch is a {type(batch).__name__}, and inputs and what is wanted are needed; give "
            "data of at least two parts, let the model return its loss and leave train.loss out, "
            "or write a step function (train.step)"
        )
    if not isinstance(batch, Mapping):
        return tuple(batch[:-1]), {}, batch[-1]
    last = _wanted_name(batch)
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


def _wanted_name(batch: Mapping[str, Any]) -> str:
    return _LABELS if _LABELS in batch else list(batch)[-1]


def _wanted_of(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch[_wanted_name(batch)]
    return batch[-1] if isinstance(batch, tuple | list) else batch


def _entry(out: Any, name: str) -> Any:
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def _loss_in(out: Any, _wanted: Any) -> Tensor:
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
