"""An exception of the user's code in one stage is raised on all ranks, and training can go on."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import hpctrain as hpc
from hpctrain.errors import StageError
from mpi_tests.pipeline_kit import TOLERANCE, Trained, build, global_batch, pipelines


@pytest.fixture(scope="module", params=pipelines())
def grid(world, request):
    with hpc.Grid(world, pipeline=request.param) as made:
        yield made


class Fragile(nn.Module):
    """Raises in forward or backward when it is told to."""

    fails_in = ""

    def forward(self, x):
        if self.fails_in == "forward":
            raise ValueError("the user's own")
        out = torch.tanh(x)
        if self.fails_in == "backward":
            out.register_hook(self.fail)
        return out

    def fail(self, gradient):
        raise ValueError("the user's own")


def fragile():
    model = build()
    for place in range(1, 10, 2):
        model[place] = Fragile()
    return model


class Told:
    """A loss function that raises when it is told to."""

    fails = False

    def __call__(self, output, target):
        if self.fails:
            raise ValueError("the user's own")
        return mse_loss(output, target)


def break_one(grid, pair, where):
    """On one rank, in one stage; the stage."""
    stage = grid.pipeline - 1 if where == "loss" else grid.pipeline // 2
    loss_fn = Told()
    mine = grid.coordinate.pipeline == stage and grid.coordinate.data == grid.data - 1
    if mine and where == "loss":
        loss_fn.fails = True
    elif mine:
        layers = [one for one in pair.replica.model.modules() if isinstance(one, Fragile)]
        layers[0].fails_in = where
    return stage, loss_fn, mine


def mend(pair):
    for one in pair.replica.model.modules():
        if isinstance(one, Fragile):
            one.fails_in = ""


@pytest.mark.parametrize("divide", [{}, {"shard": "parameters"}], ids=["whole", "sharded"])
def test_all_ranks_raise_and_go_on(grid, world, divide):
    pair = Trained(grid, fragile, divide=divide)
    pair.learn(0)
    pair.learn_alone([0])
    for where in ("forward", "loss", "backward"):
        stage, loss_fn, mine = break_one(grid, pair, where)
        told = rf"stage {stage} \(.*\): ValueError: the user's own \(in the"
        with pytest.raises(StageError, match=told) as raised:
            pair.learn(0, loss_fn)  # of known shapes
        assert len(set(world.comm.allgather(str(raised.value)))) == 1
        if mine:
            assert isinstance(raised.value.__cause__, ValueError)
        pair.replica.zero_grad()
        mend(pair)
    for number in (1, 2):
        pair.learn(number)
        pair.learn_alone([number])
    pair.check()


def test_evaluation_raises_on_the_stages_of_a_data_coordinate(grid):
    pair = Trained(grid, fragile)
    x, _ = global_batch(1, 7)
    with torch.no_grad():
        pair.replica(x)
        stage, _, _ = break_one(grid, pair, "forward")
        if grid.pipeline == 1:
            pass  # one stage raises what the user's code does
        elif grid.coordinate.data == grid.data - 1:
            with pytest.raises(StageError, match=rf"stage {stage} .*the user's own"):
                pair.replica(x)
        else:
            pair.replica(x)
        mend(pair)
        assert torch.allclose(pair.replica(x), pair.alone(x), rtol=0, atol=TOLERANCE)
    pair.replica.close()


def contrast(output, target):
    """Each row against all others of its micro-batch."""
    return cross_entropy(output @ target.T, torch.arange(len(target)))


ODD_LOSSES = {
    "sum": (partial(mse_loss, reduction="sum"), "sums over its rows"),
    "module": (nn.MSELoss(reduction="sum"), "use reduction='mean'"),
    "contrast": (contrast, "is no mean over its rows"),
}


@pytest.mark.parametrize("name", list(ODD_LOSSES))
def test_a_loss_that_is_no_mean_is_refused_on_all_ranks(grid, world, name):
    loss_fn, message = ODD_LOSSES[name]
    pair = Trained(grid)
    for _ in range(2):
        with pytest.raises(StageError, match=message):
            pair.learn(0, loss_fn)
        pair.replica.zero_grad()
    pair.learn(0)
    pair.learn_alone([0])
    pair.check()
