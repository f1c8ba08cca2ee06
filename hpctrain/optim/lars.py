"""LARS: momentum SGD whose step is proportional to each parameter's own norm."""

from __future__ import annotations

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

__all__ = ["LARS"]


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
            torch._foreach_mul_(directions, _trust(group, weights, grads))
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, directions)
        torch._foreach_sub_(weights, buffers)


def _trust(group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    of_weights, of_grads = norms(weights), norms(grads)
    below = torch._foreach_add(of_grads, of_weights, alpha=group["weight_decay"])
    ratios = torch._foreach_div(of_weights, below)
    torch._foreach_mul_(ratios, group["trust_coefficient"])
    return ratios_or_one(of_weights, list(ratios), of_grads)
