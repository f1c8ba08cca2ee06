"""Gradients in 16 bits: half the bytes of float32, with 8 (bf16) or 11 (fp16) significant bits."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.wire.wire import Wire

__all__ = ["Bf16Wire", "Fp16Wire"]

_LARGEST_EXPONENT = 14
"""Scaled values stay below 2 ** 15, well within float16, and far above its smallest numbers."""
_LARGEST_SHIFT = 120
"""2 to this power is a float32."""


class Bf16Wire(Wire):
    """The range of float32 with 8 significant bits; what most training in bf16 has anyway."""

    name = "bf16"

    def num_bytes(self, num_elements: int) -> int:
        """Two for each element."""
        return 2 * num_elements

    def encode(self, values: Tensor, key: str) -> Tensor:
        """Round to the nearest bfloat16."""
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Exact: every bfloat16 is a float32."""
        into.copy_(encoded.view(torch.bfloat16))


class Fp16Wire(Wire):
    """11 significant bits, scaled by a power of two for each message: nothing overflows.

    Elements below 2 ** -39 of the largest one in their message become 0. The exponent of the scale
    is the first element of the message. Infinities and NaN arrive as such.
    """

    name = "fp16"

    def num_bytes(self, num_elements: int) -> int:
        """Two for each element, and two for the scale."""
        return 2 * num_elements + 2

    def encode(self, values: Tensor, key: str) -> Tensor:
        """Scale so that the largest element nearly fills float16, and round to the nearest."""
        encoded = torch.empty(values.numel() + 1, dtype=torch.float16, device=values.device)
        if values.numel() == 0:
            return encoded.zero_().view(torch.uint8)
        largest = values.abs().max()
        shift = (_LARGEST_EXPONENT - torch.frexp(largest).exponent).clamp(max=_LARGEST_SHIFT)
        shift = torch.where(largest.isfinite() & (largest > 0), shift, 0)
        encoded[0] = shift
        encoded[1:] = torch.ldexp(values, shift)
        return encoded.view(torch.uint8)

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Exact: multiplication by a power of two."""
        numbers = encoded.view(torch.float16)
        into.copy_(torch.ldexp(numbers[1:].to(into.dtype), -numbers[0].to(torch.int32)))
