"""Stages whose weights lie in shards over their data ranks train as one process does."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.precision import LossScaling
from mpi_tests.pipeline_kit import FEATURES, TOLERANCE, Trained, build, global_batch

SHARDED = {"shard": "parameters"}


def pipelines():
    """Numbers of stages to try: with several data ranks, and with one."""
    size = MPI.COMM_WORLD.Get_size()
    return [2] if size == 4 else sorted({1, size})


@pytest.fixture(scope="module", params=pipelines())
def grid(world, request):
    with hpc.Grid(world, pipeline=request.param) as made:
        yield made


CASES = {
    "parameters": (SHARDED, {"accumulate": 1, "clip_norm": 0.05}),
    "gradients-gpipe": ({"shard": "gradients"}, {"accumulate": 2, "schedule": "gpipe"}),
    "whole-gradients": ({**SHARDED, "whole_gradients": True}, {"accumulate": 2, "clip_norm": 0.05}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(grid, case):
    """Unequal shares, smaller last batches, tied weights, clipping over the grid, accumulation."""
    divide, options = CASES[case]
    pair = Trained(grid, divide=divide, **options)
    pair.replica.measures_norm = True
    accumulate = options["accumulate"]
    for number in range(4):
        done = pair.learn(number)
        assert bool(done.due) == ((number + 1) % accumulate == 0)
        if done.due:
            numbers = range(number + 1 - accumulate, number + 1)
            norm = pair.learn_alone(numbers, options.get("clip_norm"))
            assert abs(float(done.norm) - float(norm)) < TOLERANCE
    pair.check()


def test_evaluation_of_any_size_and_of_nothing(grid):
    pair = Trained(grid, divide=SHARDED)
    x, _ = global_batch(1, 7)
    rows = 0 if grid.data > 1 and grid.coordinate.data == 0 else 7
    with torch.no_grad():
        found, wanted = pair.replica(x[:rows]), pair.alone(x[:rows])
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, rtol=0, atol=TOLERANCE)
    pair.learn(0)  # weights that were gathered for it are not used after the step
    pair.learn_alone([0])
    with torch.no_grad():
        assert torch.allclose(pair.replica(x), pair.alone(x), rtol=0, atol=TOLERANCE)
    told = pair.replica.describe()
    assert f"stage {grid.pipeline - 1}" in told
    assert f"over {grid.data} ranks" in told
    assert "once for all micro-batches" in told
    pair.check()


def test_a_rank_without_samples(grid):
    pair = Trained(grid, divide=SHARDED)
    x, y = global_batch(0, 4)
    is_out = grid.coordinate.data == grid.data - 1 and grid.data > 1
    pair.replica.learn(mse_loss, x, y, num_samples=0 if is_out else 4)
    mse_loss(pair.alone(x), y).backward()  # the others have the same rows
    pair.own.step()
    pair.check()


class Sometimes(nn.Module):
    """Has a weight that some batches do not use, and one that none does."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(FEATURES, FEATURES)
        self.seldom = nn.Linear(FEATURES, FEATURES)
        self.never = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        out = self.always(x).tanh()
        return self.seldom(out) if len(x) > 1 else out


def some_unused():
    torch.manual_seed(5)
    return nn.Sequential(*(Sometimes() for _ in range(4))).double()


def test_unused_parameters_have_no_gradient(grid):
    """None is not zero: AdamW would decay them."""
    pair = Trained(grid, some_unused, divide=SHARDED)
    for number, rows in enumerate((4, 8)):  # micro-batches of one row use less
        x, y = global_batch(number, rows)
        pair.replica.learn(mse_loss, x, y, num_samples=rows)
        pair.own.zero_grad()
        for part, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
            (mse_loss(pair.alone(part), wanted) / 4).backward()
        pair.own.step()
        for name, parameter in pair.replica.model.named_parameters():
            used = "always" in name or ("seldom" in name and rows > 4)
            assert (parameter.grad is not None) == used, name
    pair.check()


def test_an_overflow_on_one_rank_skips_the_step_of_all(grid, world):
    def single():
        return build().float()

    scaling = LossScaling(init_scale=16.0)
    pair = Trained(grid, single, divide=SHARDED, precision="fp16", scaling=scaling)
    x, y = (one.float() for one in global_batch(0, 8))
    before = [p.detach().full_tensor().clone() for p in pair.replica.model.parameters()]
    broken = grid.coordinate.data == grid.data - 1
    done = pair.replica.learn(
        lambda out, target: mse_loss(out, target) * (float("inf") if broken else 1.0), x, y
    )
    assert not done
    for old, new in zip(before, pair.replica.model.parameters(), strict=True):
        assert torch.equal(old, new.full_tensor())
    assert pair.replica.learn(mse_loss, x, y)
    assert world.comm.allgather(pair.replica.num_skipped) == [1] * world.size
    pair.replica.close()


def test_what_cannot_be_is_refused_by_name(grid, world):
    def refused(match, **given):
        with pytest.raises(ConfigError, match=match):
            hpc.split(grid, build(), stages="auto", **given)

    refused("shard='state' and stages= together", shard="state")
    refused("choose 'state', 'gradients', 'parameters' or None", shard="everything")
    refused("matches no module", **SHARDED, units=["blocks.*"])
    refused("shares a parameter", **SHARDED, units=["0"])
    refused("units= divides a sharded model", units=["0"])
    stage = hpc.split(grid, build(), stages="auto", **SHARDED)
    optimizer = torch.optim.AdamW(stage.parameters(), 0.01)
    with pytest.raises(ConfigError, match="update='sharded' is not for a model in stages"):
        hpc.distribute(world, stage, optimizer, grid=grid, micro_batches=2, update="sharded")
    lars = hpc.optim.LARS(stage.parameters(), 0.01)
    with pytest.raises(ConfigError, match="such as AdamW"):
        hpc.distribute(world, stage, lars, grid=grid, micro_batches=2)
    replica = hpc.distribute(world, stage, optimizer, grid=grid, micro_batches=2)
    with pytest.raises(ConfigError, match="all ranks must gather"), replica.join():
        pass
    replica.close()
