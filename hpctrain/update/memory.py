"""Parameters as the memory they occupy. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["flat_gradient", "flat_memory"]


def flat_memory(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which they lie in memory; a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Somebody's gradient (or state) in the order of the parameter's memory, perhaps copied."""
    dense = gradient.detach()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    if dense.stride() == parameter.stride() or dense.numel() <= 1:
        return flat_memory(dense)
    ordered = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dense.dtype)
    return flat_memory(ordered.copy_(dense))
