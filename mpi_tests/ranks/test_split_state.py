"""`split(shard="state")`: each rank updates its part of the weights, and holds its state alone."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.pieces import Piece
from mpi_tests.built import BUILT
from mpi_tests.ranks.sharded_kit import (
    FEATURES,
    adamw,
    assert_equal,
    batch,
    build,
    mse,
    train,
    train_alone,
)
from mpi_tests.ranks.test_split_sharded import SCALING

SMALL = 256
"""Bytes: several buckets, and messages where ranks could share memory."""


@pytest.fixture(scope="module")
def grid(world):
    with hpc.Grid(world) as made:
        yield made


@contextmanager
def divided(world, grid, optimizer=adamw, *, model=None, **options):
    model = hpc.split(grid, build() if model is None else model, shard="state")
    made = optimizer(model)
    replica = hpc.distribute(world, model, made, grid=grid, **({"bucket_bytes": SMALL} | options))
    yield replica
    replica.close()


def update_of(replica):
    return replica._exchange.mode.update


@pytest.mark.parametrize("name", BUILT)
def test_every_engine_equals_one_process(world, name):
    with (
        hpc.Grid(world, engine=name) as grid,
        divided(world, grid, accumulate=2, clip_norm=0.05) as replica,
    ):
        steps = train(world, replica, batches=8, explicit=True)
        assert [step.moved for step in steps].count(True) == 4
        assert_equal(replica.model, train_alone(world.size, accumulate=2, clip_norm=0.05))
        assert replica.model.unused.weight.grad is None
        assert replica.engine.name == name
        if world.size > 1:
            assert "shard='state': reduce-scatter" in replica.describe()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.002, momentum=0.9, nesterov=True)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), 0.05)


def fused(model):
    return torch.optim.AdamW(model.parameters(), 0.01, fused=True)


@pytest.mark.parametrize("optimizer", [sgd, adagrad, fused, None])
def test_optimizers_and_the_default_bucket(world, grid, optimizer):
    optimizer = optimizer or (lambda model: torch.optim.NAdam(model.parameters(), 0.01))
    with divided(world, grid, optimizer) as replica:
        train(world, replica)
        assert_equal(replica.model, train_alone(world.size, optimizer=optimizer))


def test_ranks_of_one_node_share_the_state_instead(world, grid):
    """The state is once a node, which is 1/n a rank as well, and nothing is sent."""
    with divided(world, grid, bucket_bytes=None, clip_norm=0.05) as replica:
        train(world, replica)
        assert_equal(replica.model, train_alone(world.size, clip_norm=0.05))
        if world.size > 1:
            assert "all ranks share memory, which holds the state once" in replica.describe()
            assert "sharded by element" in replica.describe()


class Counted:
    """Counts what goes through an engine, and lets it through."""

    def __init__(self, engine, monkeypatch):
        self.calls = []
        for name, of in (("reduce_scatter", 0), ("allgather_into", 1), ("allreduce_", 0)):
            monkeypatch.setattr(engine, name, self._counting(getattr(engine, name), name, of))

    def _counting(self, call, name, of):
        def counted(*given, **named):
            self.calls.append((name, given[of].nbytes))
            return call(*given, **named)

        return counted

    def bytes_of(self, name):
        return sum(size for kind, size in self.calls if kind == name)


def test_a_step_moves_what_an_allreduce_moves(world, grid, monkeypatch):
    if world.size == 1:
        pytest.skip("one rank sends nothing")
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).double()
    with divided(world, grid, model=model, bucket_bytes=1 << 16) as replica:
        x = torch.ones(2, 64, dtype=torch.float64)
        replica.learn(mse, x, x)
        before = replica.counts()
        counted = Counted(replica.engine, monkeypatch)
        replica.learn(mse, x, x)
        num_bytes = 4 * 64 * 64 * 8
        padding = 2 * world.size * 64  # of each of the two buckets
        num_scattered = [kind for kind, _ in counted.calls].count("reduce_scatter")
        assert num_scattered == 2
        assert 0 <= counted.bytes_of("reduce_scatter") - num_bytes <= padding
        # Each rank gives its part, and gets n - 1 others.
        assert 0 <= counted.bytes_of("allgather_into") * world.size - num_bytes <= padding
        small = [size for kind, size in counted.calls if kind == "allreduce_"]
        assert len(small) == 1
        assert small[0] < 1000
        assert replica.counts()["messages"] - before["messages"] == len(counted.calls)
        assert replica.counts()["bytes"] == 2 * num_bytes


def test_a_rank_holds_its_part_of_the_state(world, grid):
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)).float()
    num_elements = sum(p.numel() for p in model.parameters())
    with divided(world, grid, model=model) as replica:
        x = torch.ones(2, 64)
        replica.learn(mse, x, x)
        held = sum(
            value.tensor.untyped_storage().nbytes()
            for state in replica.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Piece)
        )
        if world.size > 1:
            assert held <= 2 * 4 * num_elements / world.size + 4096
            assert sum(world.comm.allgather(held)) == 2 * 4 * num_elements
            assert update_of(replica).num_bytes <= held + 4 * len(list(model.parameters()))


def test_half_precision_and_an_overflow_on_one_rank(world, grid):
    """The same steps are left out as by ranks that hold everything."""
    options = {"precision": "fp16", "scaling": SCALING, "clip_norm": 1.0}

    def run(replica):
        told = []
        for number in range(5):
            bad = number == 2 and world.rank == world.size - 1
            factor = float("inf") if bad else 1.0
            x = torch.full((2 + world.rank, FEATURES), 0.1 * (number + world.rank))
            done = replica.learn(
                lambda out, target, by=factor: mse(out, target) * by, x, world.rank, x.cos()
            )
            told.append((done.reason, done.scale))
        return told

    whole_model = build().float()
    expected = run(hpc.distribute(world, whole_model, adamw(whole_model), **options))
    with divided(world, grid, model=build().float(), **options) as replica:
        assert run(replica) == expected
        assert [reason for reason, _ in expected].count("skipped") == 1
        assert_equal(replica.model, whole_model, limit=1e-4)


def test_plain_loops(world, grid):
    with divided(world, grid) as replica:
        optimizer = replica.optimizer
        for number in range(2):
            x, y = batch(1, number)[0]
            with replica.no_sync():
                mse(replica(x, 0), y).backward()
            mse(replica(x, 0), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        alone = build()
        made = adamw(alone)
        for number in range(2):
            x, y = batch(1, number)[0]
            for _ in range(2):
                mse(alone(x, 0), y).backward()
            made.step()
            made.zero_grad()
        assert_equal(replica.model, alone)


def test_whole_gradients_are_not_to_be_had(world, grid):
    """A clip by hand would see one slice; so would an addition to the last gradient."""
    if world.size == 1:
        pytest.skip("one rank has all of it")
    x, y = batch(1, 0)[0]
    with divided(world, grid) as replica:
        mse(replica(x, 0), y).backward()
        nn.utils.clip_grad_norm_(replica.model.parameters(), 0.1)
        with pytest.raises(ConfigError, match=r"changed between backward and step.* clip_norm="):
            replica.optimizer.step()
        replica.zero_grad()
        mse(replica(x, 0), y).backward()
        replica.optimizer.step()
        with pytest.raises(ConfigError, match="still has the gradient of the last exchange"):
            mse(replica(x, 0), y).backward()
        replica.zero_grad()
        with pytest.raises(ConfigError, match="every rank must update its slice"), replica.join():
            pass


def test_several_exchanges_before_a_step_add_up(world, grid):
    x, y = batch(1, 0)[0]
    with divided(world, grid) as replica:
        for _ in range(2):
            replica.backward(mse(replica(x, 0), y))
        replica.step()
        alone = build()
        made = adamw(alone)
        for _ in range(2):
            mse(alone(x, 0), y).backward()
        made.step()
        assert_equal(replica.model, alone)


def test_weights_and_state_that_the_user_changes(world, grid):
    with divided(world, grid) as replica:
        alone = build()
        made = adamw(alone)
        x, y = batch(1, 0)[0]
        for number in range(3):
            replica.learn(mse, x, 0, y)
            mse(alone(x, 0), y).backward()
            made.step()
            made.zero_grad()
            for model, optimizer in ((replica.model, replica.optimizer), (alone, made)):
                with torch.no_grad():
                    model.enter.weight.clamp_(-0.2, 0.2)
                if number == 0:
                    model.tied.bias.data = model.tied.bias.data * 2
                    optimizer.param_groups[0]["lr"] = 0.02
                if number == 1:
                    optimizer.state.clear()
        assert_equal(replica.model, alone)


def test_what_cannot_be_is_refused_by_name(world, grid):
    def told(match, model=None, optimizer=adamw, **options):
        model = hpc.split(grid, model or build(), shard="state")
        with pytest.raises(ConfigError, match=match):
            hpc.distribute(world, model, optimizer(model), grid=grid, **options)

    told("overlap=True with shard='state'", overlap=True)
    told("update='sharded' with shard='state'", update="sharded")
    told("use precision='bf16'", precision="bf16-pure")
    told(
        "treats every element alone, such as AdamW",
        optimizer=lambda model: hpc.optim.LARS(model.parameters(), 0.1),
    )
    told(
        "shard='state' with 2 optimizers",
        optimizer=lambda model: [
            torch.optim.AdamW(model.blocks.parameters()),
            torch.optim.AdamW(model.enter.parameters()),
        ],
    )
    odd = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    if world.size > 1:
        told("weight is not contiguous", model=odd, bucket_bytes=SMALL)
    model = hpc.split(grid, build(), shard="state")
    with pytest.raises(ConfigError, match="give the grid as well"):
        hpc.distribute(world, model, adamw(model))
    with pytest.raises(ConfigError, match="divided already"):
        hpc.split(grid, model, shard="parameters")
    with pytest.raises(ConfigError, match="whole_gradients=True is about models in shards"):
        hpc.split(grid, build(), shard="state", whole_gradients=True)
    with pytest.raises(ConfigError, match="or with shard='gradients' or 'parameters' a function"):
        hpc.split(grid, build, shard="state")


def test_parameters_that_come_later_are_refused(world, grid):
    if world.size == 1:
        pytest.skip("one rank has all of it")
    with divided(world, grid) as replica:
        x, y = batch(1, 0)[0]
        replica.learn(mse, x, 0, y)
        replica.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(ConfigError, match="cannot be added, converted or removed"):
            replica.learn(mse, x, 0, y)
