"""The order in which a parameter's elements lie in memory. Pure.

Gradients lie in the same order: torch's fused optimizers go through both side by side without
looking at strides.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["is_dense", "like_parameter"]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order, with no gaps or overlaps."""
    expected = 1
    pairs = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    for stride, length in pairs:
        if stride != expected:
            return False
        expected *= length
    return True


def like_parameter(flat: Tensor, parameter: Tensor) -> Tensor:
    """A piece of flat memory seen as a dense parameter is; the reverse of `flat_memory`."""
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
