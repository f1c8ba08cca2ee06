"""Which block of a tensor a rank holds, after one or two cuts."""

from __future__ import annotations

import pytest
import torch

from hpctrain.pieces import Region
from hpctrain.sharding.shards import find_region

SIZES = (1, 2, 3, 4)


def chunk(tensor, dim, count, place):
    """As torch cuts: fewer chunks than asked for leave the rest empty."""
    parts = tensor.chunk(count, dim)
    return parts[place] if place < len(parts) else tensor.narrow(dim, tensor.shape[dim], 0)


@pytest.mark.parametrize("tensor_dim", [0, 1])
def test_shards_of_a_part_of_a_layer_are_blocks(tensor_dim):
    """The tensor dimension cuts first, the data dimension what is left; uneven shards, too."""
    for rows, data, tensor in ((r, d, t) for r in (12, 24, 60) for d in SIZES for t in SIZES):
        whole = torch.arange(rows * 12).view(rows, 12)
        seen = []
        for d, t in ((d, t) for d in range(data) for t in range(tensor)):
            held = chunk(chunk(whole, tensor_dim, tensor, t), 0, data, d)
            strided = tensor_dim == 0 and tensor > 1
            region = find_region(
                whole.shape, [(0, strided, data, d), (tensor_dim, False, tensor, t)]
            )
            assert region.shape == tuple(held.shape)
            assert torch.equal(whole[region.slices_in(Region.whole(whole.shape))], held)
            seen += held.flatten().tolist()
        assert sorted(seen) == whole.flatten().tolist()


def test_what_is_not_cut_is_whole():
    assert find_region((3, 4), []) == Region.whole((3, 4))
    assert find_region((3,), [(0, False, 4, 3)]) == Region((3,), (0,))
