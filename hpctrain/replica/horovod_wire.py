"""What a gradient looks like while Horovod carries it: its seam of two methods, and what it lacks.

Horovod sends contiguous tensors of float16, float32 and float64, with counts of 32 bits. Everything
else is made fit here: bfloat16 and complex gradients, other memory layouts, half precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.errors import ConfigError

__all__ = ["Wire", "check_parameters", "near_power_of_two"]

_MOST = 2**31 - 1
_PLAIN = {torch.float32: torch.float32, torch.float64: torch.float64}


class Wire:
    """Horovod's `compress` and `decompress`.

    Args:
        half: Whether everything travels as float16.
    """

    def __init__(self, *, half: bool) -> None:
        self.half = half
        self.divisor = 1.0
        """What gradients are divided by before they leave; nobody multiplies on arrival."""

    def carried_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a gradient on its way. Halves are summed as float32: 65504 is soon full."""
        if self.half:
            return torch.float16
        return _PLAIN.get(dtype.to_real(), torch.float32)

    def compress(self, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        """What to send, and the gradient itself where the two are not one."""
        parcel = gradient.resolve_conj().resolve_neg()
        if parcel.is_complex():
            parcel = torch.view_as_real(parcel)
        if self.divisor != 1.0:
            parcel = parcel / self.divisor
        parcel = parcel.to(self.carried_as(gradient.dtype)).contiguous()
        at_home = parcel.dtype == gradient.dtype and parcel.data_ptr() == gradient.data_ptr()
        return parcel, None if at_home else gradient

    def decompress(self, parcel: Tensor, gradient: Tensor | None) -> Tensor:
        """Put what arrived where the gradient is, in its own dtype and layout."""
        if gradient is None:
            return parcel
        if not gradient.is_complex():
            return gradient.copy_(parcel)
        real = parcel.to(gradient.dtype.to_real())
        return gradient.copy_(torch.view_as_complex(real))


def check_parameters(names: Sequence[str], parameters: Sequence[Tensor], *, adasum: bool) -> None:
    """Refuse, by name, parameters whose gradients Horovod cannot carry.

    Raises:
        ConfigError: the same on all ranks.
    """
    for name, parameter in zip(names, parameters, strict=True):
        if adasum and parameter.is_complex():
            raise ConfigError(
                f"parameter {name} is complex, and op='adasum' means nothing for it; use "
                "op='average'"
            )
        count = parameter.numel() * (2 if parameter.is_complex() else 1)
        if count > _MOST:
            raise ConfigError(
                f"parameter {name} has {count} elements, and Horovod counts up to {_MOST}; use "
                "fusion='arena', which cuts long messages"
            )


def near_power_of_two(value: float) -> float:
    """The largest power of two that is not above a positive value: dividing by it rounds nothing.

    Args:
        value: Above 0.
    """
    return math.ldexp(0.5, math.frexp(value)[1])
