"""Which parameters decay and are scaled by a trust ratio, and which are left alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpctrain.errors import ConfigError

__all__ = ["is_excluded", "split_parameters"]

_NORMALISATIONS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def split_parameters(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Make two groups: what decays, and biases and normalisation, which do not. Pure.

    For any optimizer; LARS and LAMB also leave the second group's trust ratios out. Shared
    parameters are listed once, and are excluded only if they are everywhere they are used.

    Args:
        model: Its parameters, frozen ones too.
        weight_decay: Of the first group.

    Raises:
        ConfigError: the model has no parameters.
    """
    excluded: dict[Tensor, bool] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            alone = is_excluded(module, name, parameter)
            excluded[parameter] = excluded.get(parameter, True) and alone
    if not excluded:
        raise ConfigError(f"{type(model).__name__} has no parameters to split")
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p, out in excluded.items() if not out],
            "weight_decay": weight_decay,
            "trust_ratio": True,
        },
        {
            "params": [p for p, out in excluded.items() if out],
            "weight_decay": 0.0,
            "trust_ratio": False,
        },
    ]
    return [group for group in groups if group["params"]]


def is_excluded(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether a module's own parameter is a bias, or scales or shifts a normalisation. Pure.

    Vectors and scalars count as such whatever their name: they are biases, gains and gates of
    modules that nobody here can know.
    """
    return isinstance(module, _NORMALISATIONS) or name.endswith("bias") or parameter.dim() < 2
