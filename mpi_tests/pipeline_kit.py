"""A small model with tied weights, and its batches, for suites about pipelines."""

from __future__ import annotations

import torch
from mpi4py import MPI
from torch import nn

FEATURES = 6
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
