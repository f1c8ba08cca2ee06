"""A small model with tied weights, and its batches, for suites about pipelines."""

from __future__ import annotations

import torch
from mpi4py import MPI
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain as hpc

FEATURES = 6
TOLERANCE = 1e-11
SHARES = (8, 8, 5, 3)
"""Rows of a rank's batches; the last ones do not divide by 4 micro-batches."""


def pipelines():
    """Numbers of stages to try: all that divide the ranks, but one where there are several."""
    size = MPI.COMM_WORLD.Get_size()
    return [p for p in range(1, size + 1) if size % p == 0 and (p > 1 or size == 1)]


def build():
    """Five linear layers, of which the first and the last have the same weight."""
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(FEATURES, FEATURES), nn.Tanh()]
    model = nn.Sequential(*layers).double()
    model[8].weight = model[0].weight
    return model


def global_batch(number, num_rows):
    """Rows of one step over the whole grid."""
    generator = torch.Generator().manual_seed(number)
    shape = (2, num_rows, FEATURES)
    x, y = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, y


def names_of(model):
    """Of its parameters."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


class Trained:
    """The same training twice: in stages over the grid, and alone with the whole batch."""

    def __init__(self, grid, model=build, divide=None, **options):
        self.grid = grid
        self.alone = model()
        stage = hpc.split(grid, model(), **({"stages": "auto"} | (divide or {})))
        self.replica = hpc.distribute(
            grid.world,
            stage,
            torch.optim.AdamW(stage.parameters(), 0.01),
            grid=grid,
            **({"micro_batches": 4} | options),
        )
        self.own = torch.optim.AdamW(self.alone.parameters(), 0.01)

    def batch(self, number):
        """This rank's batch, and the whole one."""
        data = self.grid.data
        shares = [SHARES[(number + d) % len(SHARES)] for d in range(data)]
        x, y = global_batch(number, sum(shares))
        mine = self.grid.coordinate.data
        return x.split(shares)[mine], y.split(shares)[mine], x, y

    def learn(self, number, loss_fn=mse_loss):
        x, y, _, _ = self.batch(number)
        return self.replica.learn(loss_fn, x, y, num_samples=len(y))

    def learn_alone(self, numbers, clip_norm=None):
        """One step of one process over all rows of these batches; the norm."""
        whole = [self.batch(number)[2:] for number in numbers]
        total = sum(len(x) for x, _ in whole)
        self.own.zero_grad()
        for x, y in whole:
            (mse_loss(self.alone(x), y) * len(x) / total).backward()
        used = [p for p in self.alone.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(used, float("inf") if clip_norm is None else clip_norm)
        self.own.step()
        return norm

    def check(self):
        wanted = dict(self.alone.named_parameters(remove_duplicate=False))
        for name, parameter in self.replica.model.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            assert torch.allclose(whole, wanted[name], rtol=0, atol=TOLERANCE), name
        self.replica.close()
