"""Models that `hpc.split` has sharded train as one process does, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError, DriftError
from hpctrain.replica.modes import GatherOrder
from mpi_tests.ranks.sharded_kit import (
    FEATURES,
    Net,
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
SCALING = hpc.precision.LossScaling(init_scale=1024.0, growth_interval=3, max_skips=5)


@pytest.fixture(scope="module")
def grid(world):
    with hpc.Grid(world) as made:
        yield made


CASES = {
    "state": ("state", False, {"accumulate": 2, "clip_norm": 0.05}),
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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_and_an_overflow_on_one_rank(world, grid, precision):
    """The same steps are left out, and the weights are those of ranks that hold everything."""
    scaling = SCALING if precision == "fp16" else None
    options = {"precision": precision, "scaling": scaling, "clip_norm": 1.0}

    def loss_of(number):
        bad = precision == "fp16" and number == 2 and world.rank == world.size - 1
        return lambda out, target: mse(out, target) * (float("inf") if bad else 1.0)

    def run(replica):
        told = []
        for number in range(5):
            x = torch.full((2 + world.rank, FEATURES), 0.1 * (number + world.rank))
            done = replica.learn(loss_of(number), x, world.rank, x.cos())
            told.append((done.reason, done.scale))
        return told

    whole_model = build().float()
    expected = run(hpc.distribute(world, whole_model, adamw(whole_model), **options))
    model = hpc.split(grid, build().float(), shard="parameters")
    replica = hpc.distribute(world, model, adamw(model), grid=grid, **options)
    assert run(replica) == expected
    assert [reason for reason, _ in expected].count("skipped") == (precision == "fp16")
    assert_equal(model, whole_model, limit=1e-4)
    replica.close()


def test_all_in_bfloat16_over_float32_shards(world, grid):
    """As ranks that hold everything and keep masters, but for the rounding of bfloat16."""

    def sgd(model):
        return torch.optim.SGD(model.parameters(), 0.003)

    def run(replica):
        x = torch.linspace(-1, 1, 3 * FEATURES).view(3, FEATURES) + 0.1 * world.rank
        for _ in range(4):
            replica.learn(mse, x, 0, x.sin())

    seen = set()
    whole_model, model = build().float(), build().float()
    held = hpc.distribute(world, whole_model, sgd(whole_model), precision="bf16-pure")
    run(held)
    hpc.split(grid, model, shard="parameters")
    model.blocks[0].up.register_forward_pre_hook(lambda up, _: seen.add(up.weight.dtype))
    replica = hpc.distribute(world, model, sgd(model), grid=grid, precision="bf16-pure")
    run(replica)
    assert seen == {torch.bfloat16}
    found = whole(model)
    moved = max((found[n] - t).abs().max().item() for n, t in build().state_dict().items())
    with held.full_precision():
        assert_equal(model, whole_model, limit=moved / 20)
    assert all(tensor.dtype is torch.float32 for tensor in found.values())
    held.close()
    replica.close()


def test_a_model_that_no_rank_has_built_whole(world, grid):
    torch.manual_seed(3 + world.rank)  # rank 0's counts
    model = hpc.split(grid, lambda: Net().double(), shard="parameters")
    replica = hpc.distribute(world, model, adamw(model), grid=grid)
    assert all(torch.equal(t, build().state_dict()[n]) for n, t in whole(model).items())
    train(world, replica)
    assert_equal(model, train_alone(world.size))
    replica.close()
    with pytest.raises(ConfigError, match="give the function that builds the model"):
        hpc.split(grid, nn.Linear(2, 2, device="meta"), shard="parameters")
    with pytest.raises(ConfigError, match="cannot be built without data"):
        hpc.split(grid, lambda: nn.Linear(2, int(torch.ones(()).item())), shard="parameters")


class Noted:
    """An observer."""

    def __init__(self):
        self.phases, self.steps = [], []

    def begin(self, phase):
        self.phases.append(phase)

    def end(self, phase):
        pass

    def stepped(self, number):
        self.steps.append(number)


def test_observers_and_the_sentinel_go_on(world, grid):
    """Shards differ by right; buffers are compared."""
    model = build()
    model.register_buffer("same", torch.ones(2))
    hpc.split(grid, model, shard="parameters")
    replica = hpc.distribute(world, model, adamw(model), grid=grid)
    noted = Noted()
    replica.observe(noted)
    sentinel = hpc.Sentinel(world, model, every=1)
    assert sentinel.names == ("same",) or world.size == 1
    train(world, replica, batches=2, first=1)
    assert sentinel.step()
    assert noted.steps == [1, 2]
    assert {"forward", "backward", "exchange", "update"} <= set(noted.phases)
    if world.size > 1:
        model.same += world.rank
        with pytest.raises(DriftError, match="same of rank"):
            sentinel.step()
    sentinel.close()
    replica.close()


class Forked(nn.Module):
    """Ranks may go different ways, through units of the same size."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x, way):
        return self.ways[way](x)


def test_on_gpus_gathers_are_compared_a_step_later(world, grid):
    order = GatherOrder(grid.engine("data"), grid.comm("data"))
    for digest in (2**32 - 1, 0, world.rank):
        order.check(digest)
    if world.size > 1:
        with pytest.raises(CollectiveError, match="in the last step the ranks have gathered"):
            order.check(7)
    order.check(8)
    order.close()


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


class FailOnce:
    """A hook that raises at its first call."""

    has_failed = False

    def __call__(self, *_given):
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("in forward")


def test_a_whole_model_on_a_grid_trains_as_without(world, grid):
    model = build()
    replica = hpc.distribute(world, model, adamw(model), grid=grid, clip_norm=0.05)
    train(world, replica)
    assert_equal(model, train_alone(world.size, clip_norm=0.05))
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
    model.blocks[1].down.register_forward_pre_hook(once := FailOnce())
    with pytest.raises(RuntimeError, match="in forward"):
        replica(x, world.rank)
    assert once.has_failed
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
    with pytest.raises(ConfigError, match="grid=2 must be the grid"):
        hpc.distribute(world, model, optimizer, grid=2)
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
    with pytest.raises(ConfigError, match="choose 'state', 'gradients', 'parameters' or None"):
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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"units": ["blocks.*"]}, "units= .*give shard= too"),
        ({"whole_gradients": True}, "whole_gradients= .*give shard= too"),
        ({"shard": "parameters", "example": torch.ones(1)}, "example= .*stages='auto'; leave"),
        ({"shard": "state", "tensor": {"*.up": "column"}}, "together are not in this version"),
    ],
)
def test_arguments_without_effect_are_refused(grid, given, told):
    with pytest.raises(ConfigError, match=told):
        hpc.split(grid, build(), **given)
