"""A model in stages computes what one process computes, or all ranks refuse together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from hpctrain.errors import ConfigError
from hpctrain.grid import Grid
from hpctrain.optim import checkpoint_activations
from hpctrain.pipeline import PipelineRunner, cut_model
from mpi_tests.pipeline_kit import FEATURES, SHARES, build, global_batch, names_of, pipelines

TOLERANCE = 1e-11


@pytest.fixture(scope="module", params=pipelines())
def grid(world, request):
    with Grid(world, pipeline=request.param) as made:
        yield made


def runner_of(grid, model=None, micro_batches=4, **options):
    stage = cut_model(grid, build() if model is None else model)
    return PipelineRunner(grid, stage, micro_batches=micro_batches, **options)


def learn(runner, loss_fn, number, rows=None):
    """One batch over the whole grid: gradients as one process has them, and the loss."""
    grid = runner.grid
    shares = rows or [SHARES[(number + d) % len(SHARES)] for d in range(grid.data)]
    x, y = global_batch(number, sum(shares))
    mine = grid.coordinate.data
    own_x, own_y = x.split(shares)[mine], y.split(shares)[mine]
    factor = shares[mine] / sum(shares)
    loss = runner.forward_backward(loss_fn, (own_x,), own_y, factor=factor) * factor
    runner.ties.sum_gradients()
    for parameter in runner.model.parameters():
        grid.engine("data").allreduce_(parameter.grad)
    return grid.engine("data").allreduce_(loss), x, y


def compare(runner, alone):
    wanted = dict(alone.named_parameters(remove_duplicate=False))
    for name, parameter in runner.model.named_parameters():
        assert torch.allclose(parameter, wanted[name], rtol=0, atol=TOLERANCE), name
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, wanted[name].grad, rtol=0, atol=TOLERANCE), name


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_training_equals_one_process(grid, schedule):
    """AdamW, four batches of which the last are smaller and uneven, tied weights, clipping."""
    runner, alone = runner_of(grid, schedule=schedule), build()
    optimizer = torch.optim.AdamW(runner.model.parameters(), 0.01)
    own = torch.optim.AdamW(alone.parameters(), 0.01)
    assert bool(runner.model.hpctrain_cut.ties) == (grid.pipeline > 1)
    for number in range(4):
        optimizer.zero_grad()
        own.zero_grad()
        loss, x, y = learn(runner, mse_loss, number)
        wanted = mse_loss(alone(x), y)
        wanted.backward()
        assert abs(float(loss) - float(wanted.detach())) < TOLERANCE
        norm = runner.norm_squared().sqrt()
        assert abs(float(norm - nn.utils.clip_grad_norm_(alone.parameters(), 0.05))) < TOLERANCE
        for parameter in runner.model.parameters():
            parameter.grad.mul_(0.05 / (norm + 1e-6))
        compare(runner, alone)
        optimizer.step()
        own.step()
    compare(runner, alone)
    runner.close()


def test_evaluation_of_any_batch_size(grid):
    runner, alone = runner_of(grid), build()
    for num_rows in (9, 8, 5, 2, 1, 8):
        x, _ = global_batch(num_rows, num_rows)
        found = runner.evaluate(x)
        assert not found.requires_grad
        assert torch.allclose(found, alone(x), rtol=0, atol=TOLERANCE)
    runner.close()


def test_statistics_move_once_for_each_micro_batch(grid):
    """As on one process that runs the micro-batches one after the other; looking moves nothing."""

    def with_norms():
        layers = build()
        layers.insert(2, nn.BatchNorm1d(FEATURES).double())
        layers.append(nn.BatchNorm1d(FEATURES).double())
        return layers

    for checkpoints in (False, True):
        runner, alone = runner_of(grid, with_norms(), micro_batches=2), with_norms()
        if checkpoints:
            children = [n for n, m in runner.model.named_modules() if n and "." not in n]
            checkpoint_activations(runner.model, *children)
        _, x, y = learn(runner, mse_loss, 0, rows=[4] * grid.data)
        for d in range(grid.data):
            for half in (slice(4 * d, 4 * d + 2), slice(4 * d + 2, 4 * d + 4)):
                if d == grid.coordinate.data:
                    alone(x[half])
        wanted = alone.state_dict()
        for name, buffer in runner.model.named_buffers():
            assert torch.allclose(buffer, wanted[name], rtol=0, atol=TOLERANCE), name
        del y
        runner.close()


def test_a_batch_without_rows_takes_part(grid):
    runner, alone = runner_of(grid), build()
    rows = [0 if d else 5 for d in range(grid.data)]
    for parameter in runner.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loss, x, y = learn(runner, mse_loss, 0, rows=rows)
    wanted = mse_loss(alone(x), y)
    wanted.backward()
    assert abs(float(loss) - float(wanted.detach())) < TOLERANCE
    compare(runner, alone)
    runner.close()


def test_parts_that_are_frozen_and_thawed(grid):
    runner, alone = runner_of(grid), build()
    for step, learns in enumerate((True, False, True)):
        for model in (runner.model, alone):
            model.zero_grad()
            for name, parameter in model.named_parameters():
                if name.startswith(("0.", "2.", "8.weight")):
                    parameter.requires_grad_(learns)
        for parameter in runner.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        _, x, y = learn(runner, mse_loss, step)
        mse_loss(alone(x), y).backward()
        wanted = dict(alone.named_parameters(remove_duplicate=False))
        for name, parameter in runner.model.named_parameters():
            gradient = wanted[name].grad
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            assert torch.allclose(parameter.grad, gradient, rtol=0, atol=TOLERANCE), (name, learns)
    if grid.pipeline > 1:
        for name, parameter in runner.model.named_parameters():
            parameter.requires_grad_(name != "8.weight")
        refused(runner, r"0\.weight = 8\.weight is frozen in stage \d and not in stage 0")
    runner.close()


class Pair(nn.Module):
    """Two tensors from one layer to the next."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES).double()

    def forward(self, value):
        first, second = value if isinstance(value, tuple) else (value, value.t().t() * 2)
        return self.inner(first), second.t().contiguous().t()


class Join(Pair):
    def forward(self, value):
        return self.inner(value[0]) + value[1]


def test_several_tensors_between_stages(grid):
    def made():
        torch.manual_seed(5)
        return nn.Sequential(Pair(), Pair(), Pair(), Pair(), Join())

    runner, alone = runner_of(grid, made()), made()
    _, x, y = learn(runner, mse_loss, 0)
    mse_loss(alone(x), y).backward()
    compare(runner, alone)
    runner.close()


def test_measured_stages_are_the_same_on_all_ranks(grid, world):
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    stage = cut_model(grid, model, example=global_batch(0, 4)[0])
    assert torch.equal(torch.get_rng_state(), state)
    cuts = world.comm.allgather(stage.hpctrain_cut)
    assert all(cut == cuts[0] for cut in cuts)
    assert "measured" in cuts[0].why
    for name, tensor in stage.state_dict().items():
        assert torch.equal(tensor, before[name])
    everyone = {name for names in world.comm.allgather(names_of(stage)) for name in names}
    assert everyone == names_of(build())


def test_a_list_of_stages(grid):
    stages = [nn.Linear(FEATURES, FEATURES).double() for _ in range(grid.pipeline)]
    stage = cut_model(grid, stages)
    mine = grid.coordinate.pipeline
    assert names_of(stage) == {f"{mine}.weight", f"{mine}.bias"}
    with pytest.raises(ConfigError, match="one module for each stage"):
        cut_model(grid, [*stages, nn.Linear(2, 2)])


# All ranks refuse, before anything is sent


def refused(runner, match, *, x=None, y=None, loss_fn=mse_loss):
    given, target = global_batch(0, 4)
    x = given if x is None else x
    with pytest.raises(ConfigError, match=match):
        runner.forward_backward(loss_fn, (x,), target if y is None else y)


def test_mistakes_are_refused_on_all_ranks(grid, world):
    runner = runner_of(grid)
    x, y = global_batch(0, 4)
    is_last = world.rank == world.size - 1
    refused(runner, "the target has 3 rows", y=y[:3] if is_last else y)
    refused(runner, "is dict", x={"x": x} if is_last else x)
    refused(runner, "one number", loss_fn=nn.MSELoss(reduction="none"))
    refused(runner, "failed on a micro-batch of", x=torch.zeros(4, FEATURES + 1).double())
    if grid.pipeline > 1:
        other = world.rank == 0
        refused(runner, "same batch", x=x[:2] if other else x, y=y[:2] if other else y)
        refused(runner, "different contents", x=x + 1 if other else x)
    with pytest.raises(ConfigError, match="no rows"):
        runner.evaluate(x[:0])
    learn(runner, mse_loss, 0)  # and then it works
    if is_last:
        runner.model.register_parameter("late", nn.Parameter(torch.zeros(2)))
    refused(runner, "parameter late was added")
    runner.close()


def test_outputs_that_cannot_be_sent_are_refused(grid):
    class Dictionary(nn.Module):
        def forward(self, x):
            return {"x": x}

    layers = build()
    layers[-1] = nn.Sequential(layers[-1], Dictionary())
    runner = runner_of(grid, layers)
    refused(runner, r"stage \d .*returns a dict")
    runner.close()


def test_options_that_do_not_fit_are_refused(grid):
    stage = cut_model(grid, build())
    for options, match in (
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"micro_batches": 2, "schedule": "zero"}, "choose 1f1b or gpipe"),
    ):
        with pytest.raises(ConfigError, match=match):
            PipelineRunner(grid, stage, **options)
    with pytest.raises(ConfigError, match="not cut into stages"):
        PipelineRunner(grid, build(), micro_batches=2)
    with pytest.raises(ConfigError, match="is no layer"):
        cut_model(grid, build(), ["none"] * (grid.pipeline - 1) or [["none"]])
