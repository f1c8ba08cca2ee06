"""Every kind of grid of eight ranks equals one process; `launch/test_eight_ranks.py` starts it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain as hpc

FEATURES, ROWS, STEPS = 8, 22, 3
TENSOR = {"*.up": "column", "*.down": "row"}
GRIDS = {
    "8 in shards": ({}, {"shard": "parameters"}),
    "data 4 x pipeline 2": ({"pipeline": 2}, {"stages": "auto"}),
    "data 4 x pipeline 2 in shards": ({"pipeline": 2}, {"stages": "auto", "shard": "gradients"}),
    "data 2 x pipeline 4 in shards": ({"pipeline": 4}, {"stages": "auto", "shard": "parameters"}),
    "pipeline 8": ({"pipeline": 8}, {"stages": "auto"}),
    "data 4 x tensor 2": ({"tensor": 2}, {"tensor": TENSOR}),
    "data 2 x tensor 4": ({"tensor": 4}, {"tensor": TENSOR}),
    "2 x 2 x 2": ({"pipeline": 2, "tensor": 2}, {"stages": "auto", "tensor": TENSOR}),
    "2 x 2 x 2 in shards": (
        {"pipeline": 2, "tensor": 2},
        {"stages": "auto", "tensor": TENSOR, "shard": "parameters"},
    ),
}


class Block(nn.Module):
    """A residual block whose two layers can be divided."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build():
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(8)), nn.Linear(FEATURES, 1)).double()


def batch(step):
    x = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(step)).double()
    return x, x.sin().sum(1, keepdim=True)


@pytest.fixture(scope="module")
def alone():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", GRIDS)
def test_equals_one_process(world, alone, name):
    """Unequal shares: 22 rows over 2, 4 or 8 data coordinates."""
    if world.size != 8:
        pytest.skip("grids of fewer ranks have tests of their own")
    layout, division = GRIDS[name]
    with hpc.Grid(world, **layout) as grid:
        model = hpc.split(grid, build(), **division)
        options = {"micro_batches": 4} if "stages" in division else {}
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        replica = hpc.distribute(world, model, optimizer, grid=grid, clip_norm=0.1, **options)
        for step in range(STEPS):
            x, y = (one.tensor_split(grid.data)[grid.coordinate.data] for one in batch(step))
            assert replica.learn(mse_loss, x, y, num_samples=len(y)).moved
        found = {
            n: t.full_tensor() if hasattr(t, "full_tensor") else t
            for n, t in model.state_dict().items()
        }
        assert found.keys() <= alone.keys()
        for key, tensor in found.items():
            assert (tensor - alone[key]).abs().max().item() <= 1e-11, key
        replica.close()
