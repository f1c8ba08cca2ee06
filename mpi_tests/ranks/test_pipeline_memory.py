"""What a stage holds while micro-batches pass: as many activations as its schedule says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain as hpc
from hpctrain.optim import checkpoint_activations
from mpi_tests.pipeline_kit import FEATURES, Trained, global_batch, pipelines

NUM_MICRO_BATCHES = 6


@pytest.fixture(scope="module", params=pipelines())
def grid(world, request):
    with hpc.Grid(world, pipeline=request.param) as made:
        yield made


class Counting(nn.Module):
    """Counts micro-batches that have gone forward and not yet back, and forward passes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.num_forward = self.num_held = self.most_held = 0

    def forward(self, x):
        self.num_forward += 1
        out = torch.tanh(self.linear(x))
        if out.requires_grad and type(out) is torch.Tensor:
            self.num_held += 1
            self.most_held = max(self.most_held, self.num_held)
            out.register_hook(self.leave)
        return out

    def leave(self, _gradient):
        self.num_held -= 1


def counting():
    torch.manual_seed(3)
    return nn.Sequential(*(Counting() for _ in range(4))).double()


def counters(pair):
    return [one for one in pair.replica.model.modules() if isinstance(one, Counting)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_micro_batches_under_way(grid, schedule):
    pair = Trained(grid, counting, micro_batches=NUM_MICRO_BATCHES, schedule=schedule)
    x, y = global_batch(0, 2 * NUM_MICRO_BATCHES)
    pair.replica.learn(mse_loss, x, y)
    behind = grid.pipeline - grid.coordinate.pipeline
    held = behind if schedule == "1f1b" or grid.pipeline == 1 else NUM_MICRO_BATCHES
    assert [one.most_held for one in counters(pair)] == [held] * len(counters(pair))
    assert f"{schedule}, {NUM_MICRO_BATCHES} micro-batches" in pair.replica.describe()
    pair.replica.close()


@pytest.mark.parametrize("divide", [{}, {"shard": "parameters"}], ids=["whole", "sharded"])
def test_activations_are_computed_twice(grid, divide):
    """Checkpointed before the model is cut, by the names of the whole model."""

    def checkpointed():
        model = counting()
        checkpoint_activations(model, "*")
        return model

    pair = Trained(grid, checkpointed, divide=divide)
    for number in range(2):
        pair.learn(number)
        pair.learn_alone([number])
    for one in counters(pair):
        one.num_forward = 0
    pair.learn(0)
    pair.learn_alone([0])
    assert {one.num_forward for one in counters(pair)} == {2 * 4}
    pair.check()
