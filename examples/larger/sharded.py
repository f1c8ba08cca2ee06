"""Every rank keeps 1/n of the model: `hpctrain run -n 2 examples/larger/sharded.py`.

For models whose weights, gradients and optimizer's state together do not fit on a device. No rank
builds the model: `split` gets the function, and each rank makes its shards.
"""

from __future__ import annotations

import torch
from task import BATCH, EPOCHS, LR, check, net, points
from torch.nn.functional import mse_loss

import hpctrain as hpc

with hpc.init(seed=7, device="cpu") as world:
    grid = hpc.Grid(world)
    loader = hpc.Loader(world, points(), global_batch=BATCH, shuffle=False, grid=grid)
    torch.manual_seed(3)  # as train_alone has it
    model = hpc.split(grid, net, shard="parameters")  # the function, not net()
    optimizer = torch.optim.AdamW(model.parameters(), LR)  # after split
    replica = hpc.distribute(world, model, optimizer, grid=grid, clip_norm=1.0)
    for _ in range(EPOCHS):
        for x, y in loader:
            replica.learn(mse_loss, x, y, num_samples=len(y))
    world.print(replica.describe())
    check(world, replica)
