"""Models of tensor-train layers train on n ranks as they do in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.nn import TTEmbedding, TTLinear

STEPS = 4


def build():
    torch.manual_seed(3)
    return nn.Sequential(
        TTEmbedding(29, 6, padding_idx=1, ranks=3),  # 30 rows
        nn.Flatten(1),
        TTLinear(24, 10, ranks=4),
        nn.Tanh(),
        nn.Linear(10, 5),
    ).double()


def chunks(step, size):
    """One uneven chunk for each rank."""
    drawn = torch.Generator().manual_seed(step)
    return [
        (
            torch.randint(29, (1 + (rank + step) % 3, 4), generator=drawn),
            torch.randint(5, (1 + (rank + step) % 3,), generator=drawn),
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 512}], ids=["node", "arena"])
def test_equal_to_one_process(world, options):
    model, alone = build(), build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    own = torch.optim.AdamW(alone.parameters(), 1e-2)
    replica = hpc.distribute(world, model, optimizer, engine="mpi", **options)
    for step in range(STEPS):
        x, y = chunks(step, world.size)[world.rank]
        replica.learn(cross_entropy, x, y, num_samples=len(y))
        own.zero_grad()
        parts = chunks(step, world.size)
        total = sum(len(y) for _, y in parts)
        for x, y in parts:
            (cross_entropy(alone(x), y) * len(y) / total).backward()
        own.step()
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-11), name
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    assert len(set(world.comm.allgather(bits))) == 1
    replica.close()


def test_ranks_of_an_error_are_the_same_on_all_ranks(world):
    """By their own decompositions, of the same weights."""
    torch.manual_seed(5)
    dense = nn.Linear(32, 32)
    layer = TTLinear.from_dense(dense, error=0.3)
    told = world.comm.allgather(layer.shape)
    assert len(set(told)) == 1
    model = nn.Sequential(layer)
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 0.1), engine="mpi")
    replica.close()
