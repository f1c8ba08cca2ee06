"""What LARS and LAMB share: steps that are scaled by norms of whole parameters.

Everything here is element-wise but the norms. Parameters of one device and dtype are handled as one
list, so that a step launches a few fused kernels on a GPU, and one small kernel a parameter for
the trust ratios, which stay on the device: nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from hpctrain.errors import ConfigError

__all__ = ["LayerwiseOptimizer", "check_at_least_zero", "norms", "ratios_or_one"]

TensorLists = list[list[Tensor]]


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Base of optimizers that need the norms of whole parameters.

    Every group has the option `trust_ratio`: False takes it for plain: momentum SGD in LARS, Adam
    with decoupled decay in LAMB, as is usual for biases and normalisation.
    """

    shards_by: ClassVar[str] = "parameter"
    """A sharded update may give a rank some of the parameters, and never a part of one."""

    _slots: ClassVar[tuple[str, ...]] = ()
    """The names of the state tensors that each parameter has, of its shape."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss anew, as in torch.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameters in _alike(p for p in group["params"] if p.grad is not None):
                    self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters of one group, device and dtype."""
        raise NotImplementedError

    def _counted(self, parameters: list[Tensor]) -> list[float]:
        """Count a step of each parameter; how many it has made."""
        steps = []
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
            state["step"] += 1
            steps.append(state["step"].item())
        return steps

    def _lists(self, parameters: list[Tensor]) -> TensorLists:
        """Parameters, gradients and each slot of the state, complex numbers as pairs of real ones.

        Raises:
            ConfigError: a gradient is sparse.
        """
        lists: TensorLists = [[] for _ in range(2 + len(self._slots))]
        for parameter in parameters:
            grad = cast("Tensor", parameter.grad)
            if grad.is_sparse:
                name = type(self).__name__
                raise ConfigError(
                    f"{name} needs the norm of a whole gradient, and one is sparse; use "
                    "Embedding(sparse=False), or hpctrain.distribute, which makes them dense"
                )
            state = self.state[parameter]
            for slot in self._slots:
                if slot not in state:
                    state[slot] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            tensors = (parameter, grad, *(state[slot] for slot in self._slots))
            for collected, tensor in zip(lists, tensors, strict=True):
                collected.append(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        return lists


def _alike(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one device and dtype at a time, in order. Pure."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        lists.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    yield from lists.values()


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, of half-precision ones in float32. Pure."""
    exact = tensors[0].dtype in (torch.float32, torch.float64)
    dtype = tensors[0].dtype if exact else torch.float32
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def ratios_or_one(above: list[Tensor], ratios: list[Tensor], below: list[Tensor]) -> list[Tensor]:
    """Each ratio, or 1 where one of its two norms is zero: nothing to compare. Pure."""
    one = torch.ones_like(ratios[0])
    return [
        torch.where((a > 0) & (b > 0), ratio, one)
        for a, ratio, b in zip(above, ratios, below, strict=True)
    ]


def check_at_least_zero(**values: float) -> None:
    """Refuse values below zero by name. Pure.

    Raises:
        ConfigError: one is negative, or no number.
    """
    for name, value in values.items():
        if not value >= 0:
            raise ConfigError(f"{name}={value} must be 0 or more")
