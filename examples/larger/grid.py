"""Stages in shards: `hpctrain run -n 4 examples/larger/grid.py`.

Four ranks are data 2 x pipeline 2: two pipelines of two stages, each with its part of the batch.
Ranks that have the same stage keep half of it each. The run is saved, and resumes on any grid.
"""

from __future__ import annotations

import tempfile

import torch
from task import BATCH, EPOCHS, LR, check, net, points
from torch.nn.functional import mse_loss

import hpctrain as hpc

with hpc.init(seed=7, device="cpu") as world, tempfile.TemporaryDirectory() as folder:
    grid = hpc.Grid(world, pipeline=2)  # data: what is left
    loader = hpc.Loader(world, points(), global_batch=BATCH, shuffle=False, grid=grid)
    torch.manual_seed(3)  # as train_alone has it
    model = hpc.split(grid, net(), shard="parameters", stages="auto")
    optimizer = torch.optim.AdamW(model.parameters(), LR)  # after split
    replica = hpc.distribute(world, model, optimizer, grid=grid, micro_batches=8, clip_norm=1.0)
    saver = hpc.Saver(world, world.comm.bcast(folder), replica, loader)
    for x, y in saver.resume(num_epochs=EPOCHS):
        replica.learn(mse_loss, x, y, num_samples=len(y))
    world.print(grid.describe())
    check(world, replica)
    saver.close()
