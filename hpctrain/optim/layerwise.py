"""LARS and LAMB: steps that are scaled by norms of whole parameters.

Everything here is element-wise but the norms. Parameters of one device and dtype are handled as one
list, so that a step launches a few fused kernels on a GPU, and one small kernel a parameter for
the trust ratios, which stay on the device: nothing waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hpctrain.errors import ConfigError

__all__ = ["LAMB", "LARS", "LayerwiseOptimizer", "check_at_least_zero", "norms", "ratios_or_one"]


TensorLists = list[list[Tensor]]


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Base of optimizers that need the norms of whole parameters.

    Every group has the option `trust_ratio`: False takes it for plain: momentum SGD in LARS, Adam
    with decoupled decay in LAMB, as is usual for biases and normalisation.
    """

    shards_by: ClassVar[str] = "parameter"
    """A sharded update may give a rank some of the parameters, but never part of one."""

    _slots: ClassVar[tuple[str, ...]] = ()
    """The names of the state tensors that each parameter has, of its shape."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Recomputes the loss, as in torch.

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


class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, 2017), Algorithm 1.

    For each parameter w with gradient g, rate r, momentum m, decay b and trust coefficient c::

        ratio = c |w| / (|g| + b |w|)          1 where |w| or |g| is zero, or trust_ratio=False
        v = m v + r ratio (g + b w)
        w = w - v

    The rate is inside v, as published and unlike torch's SGD: when a schedule changes it, steps
    that were taken before keep theirs.

    Args:
        params: Parameters or groups; groups may have their own value of every option.
        lr: The rate r.
        momentum: m, at least 0 and below 1.
        weight_decay: b.
        trust_coefficient: c.
        trust_ratio: False leaves the ratio out: plain momentum SGD.

    Raises:
        ConfigError: an option is out of range.
    """

    _slots: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        trust_ratio: bool = True,
    ) -> None:
        check_at_least_zero(lr=lr, weight_decay=weight_decay, trust_coefficient=trust_coefficient)
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum={momentum} must be at least 0 and below 1")
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust_coefficient": trust_coefficient,
                "trust_ratio": trust_ratio,
            },
        )

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        weights, grads, buffers = self._lists(parameters)
        decay = group["weight_decay"]
        directions = (
            torch._foreach_add(grads, weights, alpha=decay)
            if decay
            else torch._foreach_mul(grads, 1.0)
        )
        torch._foreach_mul_(directions, group["lr"])
        if group["trust_ratio"]:
            torch._foreach_mul_(directions, _lars_trust(group, weights, grads))
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, directions)
        torch._foreach_sub_(weights, buffers)


def _lars_trust(group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    of_weights, of_grads = norms(weights), norms(grads)
    below = torch._foreach_add(of_grads, of_weights, alpha=group["weight_decay"])
    ratios = torch._foreach_div(of_weights, below)
    torch._foreach_mul_(ratios, group["trust_coefficient"])
    return ratios_or_one(of_weights, list(ratios), of_grads)


class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments for batch training (You et al., 2019), Algorithm 2.

    For each parameter w with gradient g, in its step t, rate r and decay b::

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + b w
        ratio = phi(|w|) / |u|                 1 where |w| or |u| is zero, or trust_ratio=False
        w = w - r ratio u

    phi limits the norm to `norm_bounds`, which by default do nothing.

    Args:
        params: Parameters or groups; groups may have their own value of every option.
        lr: The rate r.
        betas: How much the averages of gradients and of their squares keep a step.
        eps: Keeps the division from zero.
        weight_decay: b.
        norm_bounds: The least and the largest norm that phi gives.
        trust_ratio: False leaves the ratio out: Adam with decoupled decay.

    Raises:
        ConfigError: an option is out of range.
    """

    _slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        norm_bounds: tuple[float, float] = (0.0, math.inf),
        trust_ratio: bool = True,
    ) -> None:
        check_at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas={betas} must both be at least 0 and below 1")
        if not 0 <= norm_bounds[0] <= norm_bounds[1]:
            raise ConfigError(f"norm_bounds={norm_bounds} must be a smallest and a largest norm")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "norm_bounds": norm_bounds,
                "trust_ratio": trust_ratio,
            },
        )

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        weights, grads, averages, squares = self._lists(parameters)
        steps = self._counted(parameters)
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        roots = list(torch._foreach_div(squares, [1 - beta2**step for step in steps]))
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(averages, [1 - beta1**step for step in steps]))
        torch._foreach_div_(updates, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["trust_ratio"]:
            torch._foreach_mul_(updates, _lamb_trust(group, weights, updates))
        torch._foreach_add_(weights, updates, alpha=-group["lr"])


def _lamb_trust(
    group: dict[str, Any], weights: list[Tensor], updates: list[Tensor]
) -> list[Tensor]:
    of_weights, of_updates = norms(weights), norms(updates)
    low, high = group["norm_bounds"]
    bounded = [norm.clamp(low, high) for norm in of_weights]
    ratios = list(torch._foreach_div(bounded, of_updates))
    return ratios_or_one(of_weights, ratios, of_updates)
