"""Every rank computes some of the layers: `hpctrain run -n 2 examples/larger/pipeline.py`.

For models that are a chain of layers, on ranks that are far from each other: only activations go
from one stage to the next.
"""

from __future__ import annotations

import torch
from task import BATCH, EPOCHS, LR, check, net, points
from torch.nn.functional import mse_loss

import hpctrain as hpc

with hpc.init(seed=7, device="cpu") as world:
    grid = hpc.Grid(world, pipeline=world.size)
    loader = hpc.Loader(world, points(), global_batch=BATCH, shuffle=False, grid=grid)
    torch.manual_seed(3)  # as train_alone has it
    model = hpc.split(grid, net(), stages="auto")  # this rank's stage
    optimizer = torch.optim.AdamW(model.parameters(), LR)  # after split
    replica = hpc.distribute(
        world, model, optimizer, grid=grid, micro_batches=2 * grid.pipeline, clip_norm=1.0
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            replica.learn(mse_loss, x, y, num_samples=len(y))
    world.print(replica.describe())
    check(world, replica)
