"""Digests of tensors: equal bits give equal digests, on whatever device they are.

Two numbers for each tensor, on its own device: the sum of its 64-bit words and the sum of their
squares, modulo 2**64. One flipped bit always changes the first; changes that cancel there do not in
the second. Integers are exact, so a CPU and a GPU agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["digest", "digest_all"]

_PIECE = 1 << 24
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def digest(tensor: Tensor) -> Tensor:
    """Two int64 on the tensor's device. How it is computed depends on shape and dtype alone."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() == 0:
        return torch.zeros(2, dtype=torch.int64, device=flat.device)
    if flat.numel() * flat.element_size() % 8 == 0:
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()  # words must begin where memory has them
        words = flat.view(torch.uint8).view(torch.int64)
    else:
        words = flat.view(_BY_SIZE[flat.element_size()]).to(torch.int64)
    return torch.stack([words.sum(), _sum_of_squares(words)])


def _sum_of_squares(words: Tensor) -> Tensor:
    if words.device.type == "cpu":
        return torch.dot(words, words)
    # No integer dot on GPUs; in pieces, because the squares take memory.
    pieces = [piece.mul(piece).sum() for piece in torch.split(words, _PIECE)]
    return torch.stack(pieces).sum()


def digest_all(tensors: Sequence[Tensor | None]) -> list[int]:
    """The digests of many tensors, one after the other; the host waits once for each device.

    A tensor that is not there counts as -1, -1.
    """
    found = [None if tensor is None else digest(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(found):
        if one is not None:
            by_device.setdefault(one.device, []).append(index)
    numbers = [-1] * (2 * len(found))
    for indices in by_device.values():
        values = torch.stack([one for i in indices if (one := found[i]) is not None]).tolist()
        for index, (total, squares) in zip(indices, values, strict=True):
            numbers[2 * index : 2 * index + 2] = [total, squares]
    return numbers
