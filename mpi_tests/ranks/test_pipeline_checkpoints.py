"""Checkpoints of a model in stages: another grid and one process resume from them."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import mse_loss

import hpctrain as hpc
from hpctrain.errors import ConfigError
from mpi_tests.pipeline_kit import build, global_batch, pipelines
from mpi_tests.ranks.test_loader import first_ranks
from mpi_tests.ranks.test_saver import common

TOLERANCE = 1e-11


def adamw(model):
    """Two groups: weights decay, biases do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], 0.01)


@contextmanager
def run(world, folder, num_stages, **divide):
    """A model of its own in so many stages (0: not cut), with its saver."""
    grid = None if num_stages == 0 else hpc.Grid(world, pipeline=num_stages)
    model, options = build(), {}
    if grid is not None:
        model = hpc.split(grid, model, stages="auto", **divide)
        options = {"grid": grid, "micro_batches": 3}
    replica = hpc.distribute(world, model, adamw(model), **options)
    saver = hpc.Saver(world, folder, replica, every_s=None)
    yield replica, saver
    saver.close()
    replica.close()
    if grid is not None:
        grid.close()


def train(replica, numbers):
    """Every rank has the whole batch: each data coordinate then counts the same."""
    for number in numbers:
        x, y = global_batch(number, 7)
        assert replica.learn(mse_loss, x, y, num_samples=len(y))


def train_alone(num_batches):
    model = build()
    optimizer = adamw(model)
    for number in range(num_batches):
        x, y = global_batch(number, 7)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def compare(replica, num_batches):
    """Weights, and the optimizer's moments of each parameter, with those of one process."""
    alone, optimizer = train_alone(num_batches)
    wanted = dict(alone.named_parameters(remove_duplicate=False))
    for name, parameter in replica.model.named_parameters():
        assert torch.allclose(whole(parameter), wanted[name], rtol=0, atol=TOLERANCE), name
        mine, other = replica.optimizer.state[parameter], optimizer.state[wanted[name]]
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert torch.allclose(whole(mine[key]), value, rtol=0, atol=TOLERANCE), (name, key)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_another_grid_resumes(world, tmp_path):
    """From one number of stages to the next, by way of a model that is not cut."""
    folder = common(world, tmp_path)
    for number, num_stages in enumerate([*pipelines(), 0, *pipelines()[:1]]):
        with run(world, folder, num_stages) as (replica, saver):
            assert (saver.restore() is not None) == (number > 0)
            assert replica.num_steps == number
            if number:
                compare(replica, number)
            train(replica, [number])
            compare(replica, number + 1)
            saver.save(wait=True)


def test_sharded_stages_resume_from_any_grid_and_to_any(world, tmp_path):
    folder = common(world, tmp_path)
    middle = 2 if world.size == 4 else 1
    grids = [(middle, "parameters"), (0, None), (world.size, "gradients"), (middle, "gradients")]
    for number, (num_stages, shard) in enumerate(grids):
        divide = {} if shard is None else {"shard": shard}
        with run(world, folder, num_stages, **divide) as (replica, saver):
            assert (saver.restore() is not None) == (number > 0)
            if number:
                compare(replica, number)
            train(replica, [number])
            compare(replica, number + 1)
            saver.save(wait=True)
    with first_ranks(world, 1) as some:
        if some is not None:
            with run(some, folder, 0) as (replica, saver):
                assert saver.restore().num_ranks == world.size
                compare(replica, len(grids))
    world.comm.Barrier()


def test_one_process_resumes_and_goes_back(world, tmp_path):
    folder = common(world, tmp_path)
    with run(world, folder, world.size) as (replica, saver):
        train(replica, range(2))
        saver.save(wait=True)
    with first_ranks(world, 1) as some:
        if some is not None:
            with run(some, folder, 0) as (replica, saver):
                assert saver.restore().num_ranks == world.size
                compare(replica, 2)
                train(replica, range(2, 3))
                saver.save(wait=True)
    world.comm.Barrier()
    with run(world, folder, world.size) as (replica, saver):
        assert saver.restore().num_ranks == 1
        compare(replica, 3)


def test_parameters_in_another_order_are_refused(world):
    with hpc.Grid(world, pipeline=world.size) as grid:
        model = hpc.split(grid, build(), stages="auto")
        optimizer = torch.optim.AdamW(list(model.parameters())[::-1], 0.01)
        with pytest.raises(ConfigError, match=r"in the order of model\.parameters\(\)"):
            hpc.distribute(world, model, optimizer, grid=grid, micro_batches=2)
