"""Models that `hpc.split` has sharded train as one process does, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError
from mpi_tests.ranks.sharded_kit import (
    FEATURES,
    adamw,
    assert_equal,
    batch,
    build,
    mse,
    train,
    train_alone,
    whole,
)

KINDS = ("gradients", "parameters")


@pytest.fixture(scope="module")
def grid(world):
    with hpc.Grid(world) as made:
        yield made


CASES = {
    "gradients": ("gradients", False, {}),
    "parameters": ("parameters", False, {}),
    "gradients-accumulate": ("gradients", False, {"accumulate": 2, "clip_norm": 0.05}),
    "parameters-accumulate": ("parameters", False, {"accumulate": 2, "clip_norm": 0.05}),
    "gradients-whole": ("gradients", True, {"accumulate": 2}),
    "parameters-whole": ("parameters", True, {"accumulate": 2, "clip_norm": 0.05}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(world, grid, case):
    kind, whole_gradients, options = CASES[case]
    model = hpc.split(grid, build(), shard=kind, whole_gradients=whole_gradients)
    replica = hpc.distribute(world, model, adamw(model), grid=grid, **options)
    steps = train(
        world,
        replica,
        batches=4 * options.get("accumulate", 1),
        explicit=case == "parameters-accumulate",
    )
    assert [step.moved for step in steps].count(True) == 4
    assert_equal(model, train_alone(world.size, **options))
    assert model.unused.weight.grad is None  # None is not zero: AdamW would have decayed it
    replica.close()


def test_units_are_the_blocks_and_may_be_named(world, grid):
    model = hpc.split(grid, build(), shard="parameters")
    replica = hpc.distribute(world, model, adamw(model), grid=grid)
    told = replica.describe()
    assert "2 and the root" in told
    assert "shard='parameters'" in told
    replica.close()
    model = hpc.split(grid, build(), shard="parameters", units=["blocks.*", "blocks.*.up"])
    replica = hpc.distribute(world, model, adamw(model), grid=grid)
    assert "4 and the root" in replica.describe()
    train(world, replica)
    assert_equal(model, train_alone(world.size))
    replica.close()


def test_norm_is_that_of_the_whole_gradient(world, grid):
    model = hpc.split(grid, build(), shard="parameters")
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 0.0), grid=grid)
    replica.measures_norm = True
    (step,) = train(world, replica, batches=1, first=1)
    alone = build()
    parts = batch(world.size, 1)
    total = sum(len(y) for _, y in parts)
    for chunk, (x, y) in enumerate(parts):
        if len(y):
            (mse(alone(x, chunk), y) * len(y) / total).backward()
    expected = nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None])
    assert abs(step.norm - expected.item()) <= 1e-11
    replica.close()


def test_weights_gathered_before_a_step_are_not_used_after_it(world, grid):
    """torch keeps the root's weights after an evaluation, and would use them again."""
    model = hpc.split(grid, build(), shard="gradients")
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 0.1), grid=grid)
    x, y = batch(world.size, 2)[world.rank]
    replica.backward(mse(replica(x, world.rank), y), num_samples=len(y))
    with torch.no_grad():
        replica(x, world.rank)
    replica.step()
    fresh = build()
    fresh.load_state_dict(whole(model))
    probe = torch.ones(2, FEATURES, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(replica(probe), fresh(probe))
    replica.close()


class Forked(nn.Module):
    """Ranks may go different ways, through units of the same size."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x, way):
        return self.ways[way](x)


def test_ranks_on_different_branches_are_refused(world, grid):
    torch.manual_seed(3)
    model = hpc.split(grid, Forked().double(), shard="parameters")
    replica = hpc.distribute(world, model, adamw(model), grid=grid)
    before = whole(model)
    x = torch.ones(2, FEATURES, dtype=torch.float64)
    replica.learn(mse, x, 0, x)
    if world.size > 1:
        before = whole(model)
        with pytest.raises(CollectiveError, match="gathered different units"):
            replica.learn(mse, x, int(world.rank == 1), x)
        after = whole(model)
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert replica.learn(mse, x, 1, x)  # all ranks the same way: right again
    replica.close()


def test_an_interrupted_pass_can_be_left_behind(world, grid):
    model = hpc.split(grid, build(), shard="parameters")
    replica = hpc.distribute(world, model, adamw(model), grid=grid)
    train(world, replica, batches=1)
    x, y = batch(world.size, 1)[world.rank]

    def fail(_gradient):
        raise RuntimeError("on every rank")

    out = replica(x, world.rank)
    out.register_hook(fail)
    with pytest.raises(RuntimeError, match="on every rank"):
        replica.backward(mse(out, y), num_samples=len(y))
    replica.zero_grad()
    train(world, replica, batches=3, first=1)
    assert_equal(model, train_alone(world.size))
    replica.close()


def test_what_cannot_be_is_refused_by_name(world, grid):
    model = build()
    early = adamw(model)
    hpc.split(grid, model, shard="parameters")
    with pytest.raises(ConfigError, match="the optimizer was made before split"):
        hpc.distribute(world, model, early, grid=grid)
    optimizer = adamw(model)
    with pytest.raises(ConfigError, match="give the grid as well"):
        hpc.distribute(world, model, optimizer)
    with pytest.raises(ConfigError, match="a grid brings its own engine"):
        hpc.distribute(world, model, optimizer, grid=grid, engine="mpi")
    with pytest.raises(ConfigError, match="micro_batches=2, and the grid has no pipeline"):
        hpc.distribute(world, model, optimizer, grid=grid, micro_batches=2)
    with pytest.raises(ConfigError, match="update='sharded' with a model that split"):
        hpc.distribute(world, model, optimizer, grid=grid, update="sharded")
    with pytest.raises(ConfigError, match="treats every element alone, such as AdamW"):
        hpc.distribute(world, model, hpc.optim.LARS(model.parameters(), 0.1), grid=grid)
    with pytest.raises(ConfigError, match="divided already"):
        hpc.split(grid, model, shard="gradients")
    with pytest.raises(ConfigError, match="choose 'gradients', 'parameters' or None"):
        hpc.split(grid, build(), shard="everything")
    with pytest.raises(ConfigError, match="is a ModuleList, which has no forward"):
        hpc.split(grid, build(), shard="parameters", units=["blocks"])
    with pytest.raises(ConfigError, match=r"leave shares a parameter with tied"):
        hpc.split(grid, build(), shard="parameters", units=["leave"])
    odd = build()
    odd.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    with pytest.raises(ConfigError, match="scale is a single number"):
        hpc.split(grid, odd, shard="parameters")
    odd = build()
    odd.blocks[1].norm.float()
    with pytest.raises(ConfigError, match=r"blocks\.1 has parameters of several dtypes"):
        hpc.split(grid, odd, shard="parameters")
    if world.size > 1:
        with pytest.raises(ConfigError, match="shard is 'parameters' on rank 0 and 'gradients'"):
            hpc.split(grid, build(), shard=KINDS[world.rank == 0])


def test_calls_that_do_not_fit_are_refused(world, grid):
    model = hpc.split(grid, build(), shard="parameters")
    replica = hpc.distribute(world, model, adamw(model), grid=grid)
    with pytest.raises(ConfigError, match="num_samples=0 with a sharded model"):
        replica.backward(None, num_samples=0)
    with pytest.raises(ConfigError, match="all ranks must gather"), replica.join():
        pass
    replica.close()
    model = hpc.split(grid, build(), shard="parameters")
    replica = hpc.distribute(world, model, adamw(model), grid=grid)
    x = torch.ones(2, FEATURES, dtype=torch.float64)
    with pytest.raises(ConfigError, match="gradients leave while backward runs"):
        mse(replica(x, 0), x).backward()
    replica.close()
