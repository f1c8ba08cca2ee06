"""LAMB: Adam whose step is proportional to each parameter's own norm."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hpctrain.errors import ConfigError
from hpctrain.optim.layerwise import (
    LayerwiseOptimizer,
    check_at_least_zero,
    norms,
    ratios_or_one,
)

__all__ = ["LAMB"]


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
            raise ConfigError(f"norm_bounds={norm_bounds} must be a least and a largest norm")
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
            torch._foreach_mul_(updates, _trust(group, weights, updates))
        torch._foreach_add_(weights, updates, alpha=-group["lr"])


def _trust(group: dict[str, Any], weights: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
    of_weights, of_updates = norms(weights), norms(updates)
    low, high = group["norm_bounds"]
    bounded = [norm.clamp(low, high) for norm in of_weights]
    ratios = list(torch._foreach_div(bounded, of_updates))
    return ratios_or_one(of_weights, ratios, of_updates)
