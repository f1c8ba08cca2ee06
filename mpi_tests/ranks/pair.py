"""The same training twice, on all ranks and alone, for tests that compare the two."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.replica.equal_ranks import digest
from mpi_tests.models import MODELS, OPTIMIZERS, batch

STEPS = 8


def build(name="mlp"):
    torch.manual_seed(5)
    return MODELS[name]().double()


class Pair:
    """The same training twice: on all ranks, and alone with the whole batch."""

    def __init__(self, world, engine, model="mlp", optimizer="adamw", **options):
        self.world = world
        self.model, self.alone = build(model), build(model)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.own = OPTIMIZERS[optimizer](self.alone)
        self.replica = hpc.distribute(world, self.model, self.optimizer, engine=engine, **options)

    def chunks(self, step):
        return batch(step, [3] * self.world.size)

    def loss(self, step):
        x, y = self.chunks(step)[self.world.rank]
        return cross_entropy(self.replica(x, self.world.rank), y)

    def whole_loss(self, step):
        chunks = self.chunks(step)
        losses = [cross_entropy(self.alone(x, i), y) for i, (x, y) in enumerate(chunks)]
        return sum(losses) / len(losses)

    def check(self):
        for (name, mine), other in zip(
            self.model.named_parameters(), self.alone.named_parameters(), strict=True
        ):
            assert torch.allclose(mine, other[1], rtol=0, atol=1e-9), name
        digests = self.world.comm.allgather(digest(self.model.parameters()))
        assert len(set(digests)) == 1
        self.replica.close()


@pytest.fixture
def pair(world, engines):
    def make(**options):
        return Pair(world, engines["mpi"], **options)

    return make
