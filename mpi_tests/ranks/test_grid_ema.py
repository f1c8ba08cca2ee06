"""Averages of the weights, and BatchNorm statistics, of models that `split` has divided."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import hpctrain as hpc
from hpctrain.errors import ConfigError
from mpi_tests.ranks.sharded_kit import mse
from mpi_tests.ranks.test_saver import common
from mpi_tests.ranks.test_sentinel_grid import shape

ROWS = 4
X = torch.linspace(-1, 1, ROWS * 4, dtype=torch.float64).view(ROWS, 4)


def chain():
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(4, 4)).double()


def alone(steps):
    """The weights and their average on one process."""
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    ema = hpc.optim.EMA(model, 0.7)
    for _ in range(steps):
        optimizer.zero_grad()
        mse(model(X), X.sin()).backward()
        optimizer.step()
        ema.update()
    return model, ema


@contextmanager
def run(world, folder, how):
    """A replica of a model that was divided so or not at all, its average, and a saver of both."""
    data, pipeline = shape(world) if how == "stages" else (world.size, 1)
    with hpc.Grid(world, data=data, pipeline=pipeline) as grid:
        given = {"stages": "auto"} if how == "stages" else {"shard": how}
        model = hpc.split(grid, chain(), **given)
        options = {"stages": {"micro_batches": 2}, "state": {"bucket_bytes": 256}}.get(how, {})
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        replica = hpc.distribute(world, model, optimizer, grid=grid, **options)
        ema = hpc.optim.EMA(model, 0.7)
        saver = hpc.Saver(world, folder, replica, every_s=None, named={"ema": ema})
        yield replica, ema, saver
        saver.close()
        replica.close()


def check(ema, expected):
    """What this rank has of the averages is that of one process."""
    for name, value in ema.averages.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert (whole - expected.averages[name]).abs().max().item() <= 1e-11, name


@pytest.mark.parametrize(
    ("first", "second"),
    [("parameters", "stages"), ("stages", "gradients"), ("gradients", None), (None, "stages")],
)
def test_averages_go_from_one_division_to_another(world, tmp_path, first, second):
    folder = common(world, tmp_path)
    with run(world, folder, first) as (replica, ema, saver):
        for _ in range(2):
            replica.learn(mse, X, X.sin())
            ema.update()
        check(ema, alone(2)[1])
        saver.save(wait=True)
    with run(world, folder, second) as (replica, ema, saver):
        assert saver.restore() is not None
        assert ema.num_updates == 2
        check(ema, alone(2)[1])
        replica.learn(mse, X, X.sin())
        ema.update()
        model, expected = alone(3)
        check(ema, expected)
        with torch.no_grad():
            before = replica(X)
            with ema.swapped_in(), expected.swapped_in():
                averaged = replica(X)
                assert averaged is None or (averaged - model(X)).abs().max().item() <= 1e-11
            after = replica(X)
            assert before is None or (after - model(X)).abs().max().item() <= 1e-11
            assert before is None or torch.equal(before, after)


def test_an_average_once_a_node(world):
    with hpc.Grid(world) as grid:
        model = hpc.split(grid, chain(), shard="parameters")
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        replica = hpc.distribute(world, model, optimizer, grid=grid)
        ema = hpc.optim.EMA.once_a_node(replica.engine, model, 0.7)
        replica.learn(mse, X, X.sin())
        ema.update()
        check(ema, alone(1)[1])
        assert world.size == 1 or "weights are in shards" in ema.where
        replica.close()


def test_statistics_of_stages_are_averaged_over_the_data_dimension(world):
    data, pipeline = shape(world)
    with hpc.Grid(world, data=data, pipeline=pipeline) as grid:
        norms = [nn.BatchNorm1d(4) for _ in range(3)]
        stage = hpc.split(grid, nn.Sequential(*norms, nn.Linear(4, 4)), stages="auto")
        for buffer in stage.buffers():
            buffer.fill_(grid.coordinate.data)
        hpc.optim.average_batchnorm(grid, stage)
        for name, buffer in stage.named_buffers():
            is_count = name.endswith("num_batches_tracked")
            assert (buffer == (data - 1 if is_count else (data - 1) / 2)).all()
        with pytest.raises(ConfigError, match=r"call average_batchnorm\(grid, model\)"):
            hpc.optim.average_batchnorm(world, stage)
