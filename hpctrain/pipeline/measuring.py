"""What each layer of a chain costs, measured once on one micro-batch.

Copies run, one layer at a time: the model's buffers, its gradients and the random numbers stay as
they are.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hpctrain.errors import ConfigError
from hpctrain.pipeline.balancing import LayerCost
from hpctrain.pipeline.chain import Layer

__all__ = ["measure_layers", "weigh_layers"]

_COPIES_OF_WEIGHTS = 4
"""Weights, gradients, and the two moments of Adam."""
_TIMES = 3


def weigh_layers(layers: Sequence[Layer]) -> list[LayerCost]:
    """What layers cost by the bytes of their weights alone. Pure.

    The time of a layer is about its weights' where each of them is used once a sample.
    """
    costs = []
    for layer in layers:
        num_bytes = _bytes_of(layer.module.parameters())
        costs.append(LayerCost(float(num_bytes), _COPIES_OF_WEIGHTS * num_bytes))
    return costs


def measure_layers(layers: Sequence[Layer], example: Sequence[Tensor]) -> list[LayerCost]:
    """Run each layer forward and backward, after a first time that does not count.

    Args:
        layers: The chain; left as it is.
        example: The model's inputs, of one micro-batch.

    Raises:
        ConfigError: a layer cannot be run; the message names it.
    """
    costs: list[LayerCost] = []
    given: tuple[Any, ...] = tuple(example)
    devices = sorted({t.device for t in example if t.device.type != "cpu"}, key=str)
    for layer in layers:
        with torch.random.fork_rng(devices=[d.index or 0 for d in devices]):
            try:
                cost, output = _measure(layer.module, given)
            except Exception as error:
                raise ConfigError(
                    f"layer {layer.name} ({type(layer.module).__name__}) cannot be measured: "
                    f"{type(error).__name__}: {error}"
                ) from error
        costs.append(cost)
        given = (output,)
    return costs


def _measure(module: nn.Module, given: tuple[Any, ...]) -> tuple[LayerCost, Any]:
    copied = copy.deepcopy(module)
    seconds = []
    kept = 0
    output: Any = None
    for attempt in range(1 + _TIMES):
        inputs = tuple(_leaf(one) for one in given)
        counted: dict[int, Tensor] = {}

        def note(tensor: Tensor, counted: dict[int, Tensor] = counted) -> Tensor:
            counted[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        begin = _now(inputs)
        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            output = copied(*inputs)
        roots = [one for one in _tensors_in(output) if one.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
        if attempt:
            seconds.append(_now(inputs) - begin)
        own = {p.untyped_storage().data_ptr() for p in copied.parameters()}
        kept = sum(t.untyped_storage().nbytes() for at, t in counted.items() if at not in own)
    weights = _bytes_of(copied.parameters())
    return LayerCost(min(seconds), _COPIES_OF_WEIGHTS * weights + kept), _detached(output)


def _now(inputs: Sequence[Any]) -> float:
    if any(isinstance(one, Tensor) and one.is_cuda for one in inputs):
        torch.cuda.synchronize()
    return time.perf_counter()


def _leaf(value: Any) -> Any:
    """An input as it would arrive from another layer."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    if isinstance(value, tuple | list):
        return type(value)(_leaf(one) for one in value)
    return value


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(_detached(one) for one in value)
    return value


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [one for one in value if isinstance(one, Tensor)] if isinstance(value, tuple | list) else []
    )


def _bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
