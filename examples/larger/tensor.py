"""Every rank keeps a part of each layer: `hpctrain run -n 2 examples/larger/tensor.py`.

For layers that are too large for one device, on ranks of one node: each pair of divided layers
waits for one sum over the group in forward, and one in backward.
"""

from __future__ import annotations

import torch
from task import BATCH, EPOCHS, LR, check, net, points
from torch.nn.functional import mse_loss

import hpctrain as hpc

with hpc.init(seed=7, device="cpu") as world:
    grid = hpc.Grid(world, tensor=2)  # on four ranks: data 2 x tensor 2
    loader = hpc.Loader(world, points(), global_batch=BATCH, shuffle=False, grid=grid)
    torch.manual_seed(3)  # as train_alone has it
    model = hpc.split(grid, net(), tensor={"*.up": "column", "*.down": "row"})
    optimizer = torch.optim.AdamW(model.parameters(), LR)  # after split
    replica = hpc.distribute(world, model, optimizer, grid=grid, clip_norm=1.0)
    for _ in range(EPOCHS):
        for x, y in loader:
            replica.learn(mse_loss, x, y, num_samples=len(y))
    world.print(replica.describe())
    check(world, replica)
