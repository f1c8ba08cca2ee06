"""What torch gets silently wrong, or fails on one rank only: refused on all ranks, nothing sent.

After each refusal the same replica trains on, and ends with the weights of one process.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.replica.modes import GatherOrder
from mpi_tests.pipeline_kit import FEATURES, build, global_batch, pipelines

STEPS, ROWS = 2, 8


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.01)


def staged(num_stages):
    return {"pipeline": num_stages}, {"stages": "auto"}, {"micro_batches": 4}


DIVISIONS = {
    "sharded": ({}, {"shard": "parameters"}, {}),
    **{f"{number} stages": staged(number) for number in pipelines()},
}


class Division:
    """A model divided in one way, with its replica."""

    def __init__(self, world, name, make=build):
        layout, division, options = DIVISIONS[name]
        self.is_staged = "stages" in division
        self.world = world
        self.is_last = world.rank == world.size - 1
        """Who makes the mistake."""
        self.grid = hpc.Grid(world, **layout)
        model = hpc.split(self.grid, make(), **division)
        self.replica = hpc.distribute(world, model, adamw(model), grid=self.grid, **options)
        self.num_steps = 0

    def learn(self, x=None, y=None):
        given, target = global_batch(self.num_steps, ROWS)
        x, y = given if x is None else x, target if y is None else y
        return self.replica.learn(mse_loss, x, y, num_samples=len(y))

    def step(self):
        assert self.learn().moved
        self.num_steps += 1

    def whole(self):
        """This rank's part of the weights, as tensors of the whole where they are in shards."""
        return {
            name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
            for name, p in self.replica.model.named_parameters()
        }

    def check(self):
        """Every data coordinate had the same rows: as one process that had them once."""
        alone = build()
        optimizer = adamw(alone)
        for number in range(self.num_steps):
            x, y = global_batch(number, ROWS)
            optimizer.zero_grad()
            mse_loss(alone(x), y).backward()
            optimizer.step()
        wanted = dict(alone.named_parameters(remove_duplicate=False))
        for name, tensor in self.whole().items():
            assert torch.allclose(tensor, wanted[name], rtol=0, atol=1e-11), name

    def refuses(self, told, call, error=ConfigError):
        """All ranks raise, the weights stay, and the next step is right."""
        before = self.whole()
        with pytest.raises(error, match=told):
            call()
        after = self.whole()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        self.step()
        self.check()


@pytest.fixture(params=DIVISIONS)
def division(world, request):
    made = Division(world, request.param)
    made.step()
    yield made
    made.replica.close()
    made.grid.close()


def test_changed_shapes(division):
    """One rank's samples have one feature more than before, or its target has."""
    x, y = global_batch(1, ROWS)
    wide = torch.cat([x, x[:, :1]], 1) if division.is_last else x
    if not division.is_staged:
        return  # samples of another shape are a mistake of the forward pass, on that rank
    told = "same batch" if division.grid.pipeline > 1 else "failed on a micro-batch of"
    division.refuses(told, lambda: division.learn(wide, y))


def test_a_parameter_of_another_shape(division):
    """A layer of one rank was replaced by a wider one."""
    layer = next(one for one in division.replica.model.modules() if isinstance(one, nn.Linear))
    kept = layer.bias

    def learn():
        if division.is_last:
            layer.bias = nn.Parameter(torch.zeros(1, FEATURES + 1, dtype=torch.float64))
        try:
            division.learn()
        finally:
            layer.bias = kept

    division.refuses("bias", learn)


def test_uneven_micro_batches(division):
    """Batches that do not divide are right; one that is smaller on one rank only is refused."""
    x, y = global_batch(1, ROWS)
    rows = 5 if division.is_last else ROWS
    if division.is_staged and division.grid.pipeline > 1:
        division.refuses("same batch", lambda: division.learn(x[:rows], y[:rows]))
    assert division.learn(x[:5], y[:5]).moved


def test_parameters_added_later(division):
    late = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    groups = division.replica.optimizer.param_groups

    def learn():
        if division.is_last:
            division.replica.model.register_parameter("late", late)
            division.replica.optimizer.add_param_group({"params": [late]})
        try:
            division.learn()
        finally:
            division.replica.model._parameters.pop("late", None)
            groups[:] = groups[:1]

    division.refuses("late", learn)


class Answer(nn.Module):
    """Passes on something that is no tensor, where it is told to."""

    answer = staticmethod(lambda x: x)

    def forward(self, x):
        return self.answer(x)


ANSWERS = {
    "a dict": (lambda x: {"x": x}, "returns a dict"),
    "None": (lambda x: None, "returns a NoneType"),
    "a tuple of one": (lambda x: (x,), "returns a tuple of length 1"),
    "text": (lambda x: (x, "text"), "output 1 is str"),
    "whole numbers": (lambda x: (x, x.long()), "output 1 has dtype int64"),
    "a number": (lambda x: x.sum(), "output 0 has no dimension"),
}


@pytest.mark.parametrize("num_stages", [p for p in pipelines() if p > 1][-1:])
def test_outputs_that_are_no_tensors(world, num_stages):
    """The end of the first stage; one rank's module does it, the others' do not."""
    layers = build()
    layers = nn.Sequential(*layers[:2], Answer(), *layers[2:])
    layout, _, options = staged(num_stages)
    with hpc.Grid(world, **layout) as grid:
        cuts = [str(3 + 2 * number) for number in range(num_stages - 1)]
        model = hpc.split(grid, layers, stages=cuts)
        replica = hpc.distribute(world, model, adamw(model), grid=grid, **options)
        x, y = global_batch(0, ROWS)
        (mine,) = [one for one in model.modules() if isinstance(one, Answer)] or [Answer()]
        for function, told in ANSWERS.values():
            if world.rank == 0:
                mine.answer = function
            with pytest.raises(ConfigError, match=rf"stage 0 .*{told}"):
                replica.learn(mse_loss, x, y)
        mine.answer = Answer.answer
        assert replica.learn(mse_loss, x, y).moved
        replica.close()


def test_different_numbers_of_micro_batches(world):
    if world.size == 1:
        return
    with hpc.Grid(world, pipeline=world.size) as grid:
        model = hpc.split(grid, build(), stages="auto")
        number = 4 + (world.rank == world.size - 1)
        with pytest.raises(ConfigError, match="micro_batches"):
            hpc.distribute(world, model, adamw(model), grid=grid, micro_batches=number)


class Forked(nn.Module):
    """Two ways of the same size, of which the whole batch takes one."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.way = 0

    def forward(self, x):
        return self.ways[self.way](x)


def make_forked():
    torch.manual_seed(3)
    return nn.Sequential(Forked(), nn.Tanh(), nn.Linear(FEATURES, FEATURES)).double()


def test_branches_that_differ(world):
    """Shards: torch would compute with each other's parameters."""
    if world.size == 1:
        return
    made = Division(world, "sharded", make_forked)
    made.step()
    before = made.whole()
    made.replica.model[0].way = int(made.is_last)
    with pytest.raises(CollectiveError, match="gathered different units"):
        made.learn()
    assert all(torch.equal(made.whole()[name], tensor) for name, tensor in before.items())
    made.replica.model[0].way = 1
    assert made.learn().moved
    made.replica.close()
    made.grid.close()


@pytest.mark.parametrize("is_direct", [False, True], ids=["replica(x)", "model(x)"])
def test_branches_that_differ_in_an_evaluation(world, is_direct):
    if world.size == 1:
        return
    made = Division(world, "sharded", make_forked)
    model, alone = made.replica.model, make_forked()
    evaluate = model if is_direct else made.replica
    x, _ = global_batch(0, ROWS)
    with torch.no_grad():
        model[0].way = int(made.is_last)
        with pytest.raises(CollectiveError, match="in this evaluation the ranks have gathered"):
            evaluate(x)
        model[0].way = alone[0].way = 1
        torch.testing.assert_close(evaluate(x), alone(x))
    made.step()
    made.replica.close()
    with torch.no_grad():
        model(x)  # of a replica that is closed nothing is compared any more
    made.grid.close()


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_an_evaluation_that_gathers_nothing_is_not_collective(world, shard):
    """Weights that stay gathered are there for one rank alone, as before."""
    with hpc.Grid(world) as grid:
        model = hpc.split(grid, build(), shard=shard)
        replica = hpc.distribute(world, model, adamw(model), grid=grid)
        x, _ = global_batch(0, ROWS)
        with torch.no_grad():
            whole = replica(x)
            if shard == "gradients" and world.rank == 0:
                torch.testing.assert_close(replica(x), whole)
        replica.close()


def test_an_order_that_is_read_late(world):
    """As on GPUs: the next pass tells, and closing where there is none; each of them once."""
    with hpc.Grid(world) as grid:
        order = GatherOrder(grid.engine("data"), grid.comm("data"))
        order.check(5)
        order.check(world.rank, "evaluation")
        if world.size == 1:
            order.check(5)
            order.close()
            return
        with pytest.raises(CollectiveError, match="in the last evaluation the ranks have gathered"):
            order.check(world.rank)
        with pytest.raises(CollectiveError, match="in the last step the ranks have gathered"):
            order.close()
