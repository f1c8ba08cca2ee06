"""Divided layers in shards over the data dimension, and checkpoints of all grids."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import hpctrain as hpc
from hpctrain.errors import ConfigError
from mpi_tests.ranks.tensor_kit import (
    PATTERNS,
    SMALL,
    STEPS,
    adamw,
    alone,
    assert_equal,
    build,
    grids,
    mine,
    mse,
    rows,
    small,
    words_loss,
)
from mpi_tests.ranks.test_loader import first_ranks
from mpi_tests.ranks.test_saver import common

LAYERS = {**PATTERNS, "head": "vocabulary"}


@contextmanager
def run(world, sizes, **options):
    """A model of its own on a grid, divided so."""
    with hpc.Grid(world, timeout_s=60, **sizes) as grid:
        split = {name: options.pop(name) for name in ("shard", "units") if name in options}
        model = hpc.split(grid, build(tied=True), tensor=LAYERS, **split)
        replica = hpc.distribute(world, model, adamw(model), grid=grid, **options)
        yield grid, replica
        replica.close()


def train(grid, replica, numbers):
    for number in numbers:
        x, y = mine(grid, number)
        done = replica.learn(words_loss, x, y)
    return done


@pytest.mark.parametrize("shard", ["parameters", "gradients"])
def test_shards_of_divided_layers_equal_one_process(world, shard):
    accumulate = 2 if shard == "gradients" else 1
    want = alone(clip=0.05, tied=True, accumulate=accumulate)
    for sizes in grids(world.size)[-2:][: 1 if world.size == 4 else 2]:
        options = {"shard": shard, "clip_norm": 0.05, "accumulate": accumulate}
        with run(world, sizes, units=["attention"], **options) as (grid, replica):
            assert train(grid, replica, range(STEPS * accumulate)).moved
            assert_equal(replica.model, want)
            assert replica.model.unused.grad is None
            told = replica.describe()
            assert "1 and the root" in told
            assert ("divided layers" in told) == (grid.tensor > 1)


def test_any_grid_resumes_with_the_same_bits(world, tmp_path):
    """Tensors of one process are found again, on any grid, and go on to the same weights."""
    folder = common(world, tmp_path)
    want = alone(tied=True)
    wide = grids(world.size)[-1]
    with run(world, wide) as (grid, replica):
        saver = hpc.Saver(world, folder, replica, every_s=None)
        train(grid, replica, [0])
        saver.save(wait=True)
        kept = state(replica)
        saver.close()
    others = [(grids(world.size)[0], None)]
    others.append((grids(world.size)[world.size // 3], "parameters"))  # 2 x 2 of four
    for sizes, shard in others:
        with run(world, sizes, **({"shard": shard} if shard else {})) as (grid, replica):
            saver = hpc.Saver(world, folder, replica, every_s=None)
            assert saver.restore() is not None
            assert_same(state(replica), kept)
            train(grid, replica, range(1, STEPS))
            assert_equal(replica.model, want)
            if shard is not None:
                saver.save(wait=True)
                kept = state(replica)
            saver.close()
    with first_ranks(world, 1) as some:
        if some is not None:
            with run(some, {}) as (_, replica):
                saver = hpc.Saver(some, folder, replica, every_s=None)
                assert saver.restore().num_ranks == world.size
                assert_same(state(replica), kept)
                saver.close()


def state(replica):
    """Weights and state, whole, as one process has them."""
    tensors = {f"model.{name}": t for name, t in replica.model.state_dict().items()}
    for number, values in replica.optimizer.state_dict()["state"].items():
        tensors |= {f"{number}.{key}": value for key, value in values.items()}
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
        for name, t in tensors.items()
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("shard", [None, "parameters"])
def test_ranks_without_samples_take_part(world, shard):
    """Of a data coordinate, at times; one process sees the other rows alone."""
    sizes = grids(world.size)[world.size // 3]
    one = small()
    optimizer = adamw(one)
    with hpc.Grid(world, timeout_s=60, **sizes) as grid:
        model = hpc.split(grid, small(), tensor=SMALL, shard=shard)
        replica = hpc.distribute(world, model, adamw(model), grid=grid, clip_norm=0.1)
        for number in range(2):
            counts = [(place + number) % 2 if grid.data > 1 else 2 for place in range(grid.data)]
            own = [rows(10 * number + place, count) for place, count in enumerate(counts)]
            optimizer.zero_grad()
            mse(one(torch.cat(own)), torch.cat(own).cos()).backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
            x = own[grid.coordinate.data]
            assert replica.learn(mse, x, x.cos()).moved
        assert_equal(model, one)
        replica.close()


def test_what_is_not_there_is_refused(world):
    with hpc.Grid(world, tensor=world.size) as grid:
        with pytest.raises(ConfigError, match="use shard='gradients'"):
            hpc.split(grid, small(), tensor=SMALL, shard="state")
        if world.size == 1:
            return
        model = hpc.split(grid, small().float(), tensor=SMALL, shard="parameters")
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ConfigError, match="bf16-pure"):
            hpc.distribute(world, model, optimizer, grid=grid, precision="bf16-pure")
