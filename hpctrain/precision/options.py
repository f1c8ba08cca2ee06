"""What a precision is called, its options, and what does not go together. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hpctrain.errors import ConfigError

__all__ = ["LossScaling", "PrecisionName", "check_choice", "check_parameters"]

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "bf16-pure"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """How losses are scaled with `precision="fp16"`; the same on every rank."""

    init_scale: float = 65536.0
    """What losses are multiplied by at first; powers of two round nothing."""
    growth_factor: float = 2.0
    """What the scale is multiplied by after `growth_interval` steps in a row without overflow."""
    backoff_factor: float = 0.5
    """What the scale is multiplied by after an overflow."""
    growth_interval: int = 2000
    """Steps in a row without overflow until the scale grows."""
    max_skips: int = 20
    """Steps skipped in a row that end the run with an error that says where it began."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        if not 0 < self.init_scale < math.inf:
            raise _refuse(f"init_scale={self.init_scale} must be above 0")
        if not 1 < self.growth_factor < math.inf:
            raise _refuse(f"growth_factor={self.growth_factor} must be above 1")
        if not 0 < self.backoff_factor < 1:
            raise _refuse(f"backoff_factor={self.backoff_factor} must be between 0 and 1")
        for name in ("growth_interval", "max_skips"):
            if getattr(self, name) < 1:
                raise _refuse(f"{name}={getattr(self, name)} must be at least 1")


def check_choice(
    precision: str,
    *,
    device_type: str,
    scaling: LossScaling | None,
    clip_norm: float | None,
    clip_value: float | None,
) -> None:
    """Refuse values that are unknown, out of range, or do not go together.

    Raises:
        ConfigError: with what to do.
    """
    known = get_args(PrecisionName)
    if precision not in known:
        raise ConfigError(f"precision={precision!r} is unknown; use one of {', '.join(known)}")
    if precision == "tf32" and device_type != "cuda":
        raise ConfigError(
            f"precision='tf32' is a mode of NVIDIA GPUs, and the device is {device_type}; use "
            "'fp32' or 'bf16' there"
        )
    if scaling is not None and precision != "fp16":
        raise ConfigError(
            f"scaling is for precision='fp16'; {precision} has the range of float32, so that "
            "nothing has to be scaled: leave it out"
        )
    for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if limit is not None and not 0 < limit < math.inf:
            raise ConfigError(f"{name}={limit} must be above 0, or None for no clipping")
    if clip_norm is not None and clip_value is not None:
        raise ConfigError(
            f"clip_norm={clip_norm} and clip_value={clip_value} clip the same gradients twice; "
            "choose one"
        )


def check_parameters(
    precision: str,
    names: Sequence[str],
    parameters: Sequence[Tensor],
    clip_value: float | None,
    unclipped: Collection[int] = (),
) -> None:
    """Refuse parameters that a precision cannot train, or clipping cannot clip.

    Args:
        precision: Its name.
        names: Of the parameters.
        parameters: In the order of the optimizer's groups.
        clip_value: Limit of each element.
        unclipped: Indices of those that are not clipped.

    Raises:
        ConfigError: the first of them, by name.
    """
    for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        if precision == "fp16" and parameter.dtype == torch.float16:
            raise ConfigError(
                f"parameter {name} is float16, whose small updates are lost and whose gradients "
                "cannot be unscaled; keep the model in float32: precision='fp16' computes in "
                "float16 where that is safe"
            )
        if precision == "bf16-pure" and parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, and "
                "precision='bf16-pure' has float32 masters; convert it to float32, or use "
                "another precision"
            )
        if clip_value is not None and parameter.is_complex() and index not in unclipped:
            raise ConfigError(
                f"clip_value={clip_value} has no meaning for complex parameter {name}; use "
                "clip_norm, or a group of its own with clip=False"
            )


def _refuse(text: str) -> ConfigError:
    return ConfigError(f"LossScaling: {text}")
