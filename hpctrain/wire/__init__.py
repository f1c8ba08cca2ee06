"""Floor 1: how gradients are encoded between nodes.

Names are loaded on first use: which wires there are is known without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.wire.casting import Bf16Wire, Fp16Wire
    from hpctrain.wire.registry import BITS, NONE, make_wire, wire_names
    from hpctrain.wire.summing import add_decoded
    from hpctrain.wire.wire import ENCODABLE, Summing, Wire

__all__ = [
    "BITS",
    "ENCODABLE",
    "NONE",
    "Bf16Wire",
    "Fp16Wire",
    "Summing",
    "Wire",
    "add_decoded",
    "make_wire",
    "wire_names",
]

__getattr__ = lazy(
    __name__,
    {
        ".casting": ("Bf16Wire", "Fp16Wire"),
        ".registry": ("BITS", "NONE", "make_wire", "wire_names"),
        ".summing": ("add_decoded",),
        ".wire": ("ENCODABLE", "Summing", "Wire"),
    },
)
