"""Sums of squares, and the one factor that unscales and clips. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["clip_factor", "excluded_from_clipping", "multiply", "sum_of_squares"]

_ROW = 1024
_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_WIDE = (torch.float64, torch.complex128)


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements, which is inf or NaN if one of them is.

    In float32, or in float64 if a tensor is; on the CPU in rows, so that rounding neither grows
    with the size nor depends on the number of threads: ranks with equal bits get equal sums.
    """
    dtype = torch.float64 if any(t.dtype in _WIDE for t in tensors) else torch.float32
    norms = [norm.to(device, dtype) for tensor in tensors for norm in _norms(tensor)]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.cat(norms).square().sum()


def _norms(tensor: Tensor) -> list[Tensor]:
    flat = tensor.detach().reshape(-1)
    dtype = torch.float32 if flat.dtype in (torch.float16, torch.bfloat16) else None
    if flat.device.type != "cpu" or flat.numel() <= _ROW:
        return [torch.linalg.vector_norm(flat, dtype=dtype).reshape(1)]
    whole = flat.numel() // _ROW * _ROW
    parts = [torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)]
    if whole < flat.numel():
        parts.append(torch.linalg.vector_norm(flat[whole:], dtype=dtype).reshape(1))
    return parts


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients of that norm are multiplied by so that it does not exceed the limit."""
    return (limit / (norm + _TINY)).clamp(max=1.0)


def multiply(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply in place by a number that may be on a GPU; nothing is read back from there."""
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return
    for tensor in tensors:
        tensor.mul_(factor.to(tensor.device))


def excluded_from_clipping(groups: Iterable[dict[str, Any]]) -> frozenset[int]:
    """Indices, in the order of the groups, of parameters in groups that say `clip=False`."""
    found: list[int] = []
    index = 0
    for group in groups:
        count = len(group["params"])
        if group.get("clip", True) is False:
            found.extend(range(index, index + count))
        index += count
    return frozenset(found)
