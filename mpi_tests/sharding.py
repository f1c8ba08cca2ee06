"""A state in hand-made pieces, cut in every way, for any number of ranks."""

from __future__ import annotations

import torch

from hpctrain.checkpoint import Piece


def bounds(total, rank, size):
    """The share of a rank of `total`, as equal as it goes; empty if there are more ranks."""
    return total * rank // size, total * (rank + 1) // size


def by_rows(whole, rank, size):
    start, stop = bounds(whole.shape[0], rank, size)
    return Piece(whole[start:stop], (start, *[0] * (whole.ndim - 1)), tuple(whole.shape))


def by_columns(whole, rank, size):
    start, stop = bounds(whole.shape[1], rank, size)
    return Piece(whole[:, start:stop], (0, start), tuple(whole.shape))


def by_elements(whole, rank, size):
    start, stop = bounds(whole.numel(), rank, size)
    return Piece(whole.reshape(-1)[start:stop], start, tuple(whole.shape))


def by_pairs(whole, rank, size):
    """Two ranks hold the same rows."""
    return by_rows(whole, rank // 2, (size + 1) // 2)


CUTS = {"rows": by_rows, "columns": by_columns, "elements": by_elements, "pairs": by_pairs}


def whole_state(step=0):
    """What no rank holds all of."""
    numbers = torch.Generator().manual_seed(step)
    return {
        name: {
            "weight": torch.randn(7, 5, generator=numbers),
            "few": torch.randn(2, 3, generator=numbers),
            "half": torch.randn(9, 4, generator=numbers).to(torch.bfloat16),
            "none": torch.empty(0, 3),
        }
        for name in CUTS
    }


def cut_state(whole, rank, size, turn=0):
    """The pieces of a rank; `turn` exchanges the ways of cutting."""
    cuts = list(CUTS.values())
    return {
        name: {key: cuts[(i + turn) % len(cuts)](t, rank, size) for key, t in tensors.items()}
        for i, (name, tensors) in enumerate(whole.items())
    }


def join(tree):
    """Pieces as something that can be compared."""
    if isinstance(tree, dict):
        return {key: join(value) for key, value in tree.items()}
    return (tree.offset, tuple(tree.shape), tree.tensor) if isinstance(tree, Piece) else tree
