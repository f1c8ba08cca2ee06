"""A model that `split` has cut into stages trains by `replica.learn` as one process does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain as hpc
from hpctrain.errors import ConfigError, NonFiniteError
from hpctrain.precision import LossScaling
from mpi_tests.pipeline_kit import TOLERANCE, Trained, build, global_batch, pipelines


@pytest.fixture(scope="module", params=pipelines())
def grid(world, request):
    with hpc.Grid(world, pipeline=request.param) as made:
        yield made


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_equals_one_process(grid, accumulate):
    """Unequal shares, smaller last batches, tied weights, clipping over the grid, accumulation."""
    pair = Trained(grid, accumulate=accumulate, clip_norm=0.05)
    pair.replica.measures_norm = True
    for number in range(4):
        done = pair.learn(number)
        whole = [pair.batch(n)[2:] for n in range(number - number % accumulate, number + 1)]
        total = sum(len(x) for x, _ in whole)
        if number % accumulate == 0:
            pair.own.zero_grad()
        x, y = whole[-1]
        mse = mse_loss(pair.alone(x), y)
        own_x, own_y, _, _ = pair.batch(number)
        mine = mse_loss(pair.alone(own_x), own_y)
        assert abs(float(done.loss) - float(mine.detach())) < TOLERANCE
        (mse * len(x)).backward()
        assert bool(done.due) == ((number + 1) % accumulate == 0)
        if done.due:
            for parameter in pair.alone.parameters():
                parameter.grad /= total
            norm = nn.utils.clip_grad_norm_(pair.alone.parameters(), 0.05)
            assert abs(float(done.norm) - float(norm)) < TOLERANCE
            pair.own.step()
    assert pair.replica.num_steps == 4 // accumulate
    pair.check()


def test_evaluation_and_description(grid):
    pair = Trained(grid)
    x, _ = global_batch(1, 7)
    with torch.no_grad():
        assert torch.allclose(pair.replica(x), pair.alone(x), rtol=0, atol=TOLERANCE)
    text = pair.replica.describe()
    assert f"{grid.pipeline} stages" in text
    assert "1f1b, 4 micro-batches" in text
    pair.replica.close()


def test_a_rank_without_samples(grid):
    pair = Trained(grid)
    x, y = global_batch(0, 4)
    is_out = grid.coordinate.data == grid.data - 1 and grid.data > 1
    pair.replica.learn(mse_loss, x, y, num_samples=0 if is_out else 4)
    mse_loss(pair.alone(x), y).backward()  # the others have the same rows
    pair.own.step()
    pair.check()


def test_what_a_pipeline_has_not_is_refused_by_name(grid):
    pair = Trained(grid)
    x, y, _, _ = pair.batch(0)
    with pytest.raises(ConfigError, match="no loss before its backward"):
        pair.replica(x)
    with pytest.raises(ConfigError, match="no loss before its backward"):
        pair.replica.backward(torch.zeros((), requires_grad=True))
    with pytest.raises(ConfigError, match="mask given by name"):
        pair.replica.learn(mse_loss, x, y, mask=x)
    with pytest.raises(ConfigError, match="all stages must run together"), pair.replica.join():
        pass
    is_last = grid.world.rank == grid.world.size - 1
    with pytest.raises(ConfigError, match="rows"):
        pair.replica.learn(mse_loss, x, y[:1] if is_last else y, num_samples=len(y))
    pair.learn(0)  # nothing was left half-way
    if grid.pipeline > 1:
        if is_last:
            pair.replica.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(ConfigError, match="learning rates"):
            pair.learn(1)
    pair.replica.close()


def test_arguments_that_do_not_fit_are_refused(grid, world):
    stage = hpc.split(grid, build(), stages="auto")
    optimizer = torch.optim.AdamW(stage.parameters(), 0.01)

    def refused(match, of=stage, **options):
        with pytest.raises(ConfigError, match=match):
            hpc.distribute(world, of, optimizer, **options)

    refused("give the grid as well")
    refused("needs micro_batches=", grid=grid)
    refused("micro_batches=0", grid=grid, micro_batches=0)
    refused("not for a model in stages", grid=grid, micro_batches=2, overlap=True)
    refused("bf16-pure", grid=grid, micro_batches=2, precision="bf16-pure")
    refused("schedule='zero' is unknown", grid=grid, micro_batches=2, schedule="zero")
    refused("schedule='gpipe' needs grid= with a pipeline", schedule="gpipe", of=build())
    with pytest.raises(ConfigError, match="together are not in this version"):
        hpc.split(grid, build(), stages="auto", shard="state")
    with pytest.raises(ConfigError, match="divided already"):
        hpc.split(grid, stage, stages="auto")
    for stages, what in ((2, "stages=2 is an int; give 'auto'"), ([["0"], 3], "has 3 in it")):
        with pytest.raises(ConfigError, match=what):  # rank 0 alone would look at them
            hpc.split(grid, build(), stages=stages)
    with pytest.raises(ConfigError, match=r"without torch\.compile"):
        hpc.split(grid, torch.compile(build(), backend="eager"), stages="auto")
    with pytest.raises(ConfigError, match=r"wrapped in DataParallel.*its \.module"):
        hpc.split(grid, nn.DataParallel(build()), stages="auto")
    with pytest.raises(ConfigError, match="example is int; give the model's inputs"):
        hpc.split(grid, build(), stages="auto", example=3)
    if grid.pipeline > 1:
        with pytest.raises(ConfigError, match="give stages='auto'"):
            hpc.split(grid, build())
        refused(
            r"call split\(grid, model, stages=\.\.\.\) first",
            of=build(),
            grid=grid,
            micro_batches=2,
        )
        other = torch.optim.AdamW(build().parameters(), 0.01)
        with pytest.raises(ConfigError, match="not this stage's"):
            hpc.distribute(world, stage, other, grid=grid, micro_batches=2)


def test_a_loss_that_is_not_finite_stops_all_ranks(grid):
    pair = Trained(grid)
    before = [p.detach().clone() for p in pair.replica.model.parameters()]
    broken = grid.coordinate.data == grid.data - 1
    with pytest.raises(NonFiniteError):
        pair.learn(0, lambda out, y: mse_loss(out, y) * (float("nan") if broken else 1.0))
    for old, new in zip(before, pair.replica.model.parameters(), strict=True):
        assert torch.equal(old, new)
    pair.replica.close()


def test_an_overflow_in_one_stage_skips_the_step_of_all(grid, world):
    """fp16: the last stage's gradients overflow on one rank; nobody updates."""

    def single():
        return build().float()

    pair = Trained(grid, single, precision="fp16", scaling=LossScaling(init_scale=16.0))
    x, y = (one.float() for one in global_batch(0, 8))
    before = [p.detach().clone() for p in pair.replica.model.parameters()]
    handle = None
    if world.rank == world.size - 1:
        last = list(pair.replica.model.parameters())[-1]
        handle = last.register_hook(lambda g: g * float("inf"))
    done = pair.replica.learn(mse_loss, x, y)
    assert not done
    assert pair.replica.num_skipped == 1
    for old, new in zip(before, pair.replica.model.parameters(), strict=True):
        assert torch.equal(old, new)
    if handle is not None:
        handle.remove()
    assert pair.replica.learn(mse_loss, x, y)
    assert world.comm.allgather(pair.replica.num_skipped) == [1] * world.size
    pair.replica.close()
