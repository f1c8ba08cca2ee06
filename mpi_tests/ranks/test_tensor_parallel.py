"""Layers divided over the tensor dimension train as they do in one process, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError, NonFiniteError
from hpctrain.tensor_parallel import vocabulary_cross_entropy
from mpi_tests.ranks.tensor_kit import (  # noqa: F401
    PATTERNS,
    SMALL,
    STEPS,
    WORDS,
    adamw,
    alone,
    assert_equal,
    batch,
    build,
    grid_factory,
    grids,
    mine,
    mse,
    rows,
    small,
    words_loss,
)

CASES = {
    "accumulate": (None, {"accumulate": 2, "clip_value": 0.001}),
    "tied": ("vocabulary", {"clip_norm": 0.05}),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_process(world, make_grid, case):
    head, options = CASES[case]
    tied = {"tied": case == "tied"}
    accumulate = options.get("accumulate", 1)
    want = alone(
        clip=options.get("clip_norm"),
        clip_value=options.get("clip_value"),
        accumulate=accumulate,
        **tied,
    )
    for sizes in grids(world.size)[case == "tied" and world.size > 1 :]:
        grid = make_grid(**sizes)
        patterns = {**PATTERNS, **({"head": head} if head else {})}
        # Rank 0's weights count.
        model = hpc.split(grid, build(seed=3 + world.rank, **tied), tensor=patterns)
        replica = hpc.distribute(world, model, adamw(model), grid=grid, **options)
        for number in range(STEPS * accumulate):
            x, y = mine(grid, number)
            if number % 2:
                step = replica.learn(words_loss, x, y)
            else:
                replica.backward(words_loss(replica(x), y), num_samples=len(y))
                step = replica.step()
            assert step.moved == ((number + 1) % accumulate == 0)
        assert_equal(model, want)
        assert model.unused.grad is None
        assert not model.frozen["up"].weight.requires_grad
        replica.close()
        grid.close()


def test_scores_that_stay_divided(world, make_grid):
    grid = make_grid(tensor=world.size)
    torch.manual_seed(1)
    model = hpc.split(
        grid,
        nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)).double(),
        tensor={"1": "vocabulary"},
    )
    x, y = batch(0)
    y[0, :3] = -100
    scores = model(x)
    whole = scores.detach()
    if world.size > 1:
        assert scores.to_local().shape[-1] == WORDS // world.size
        whole = scores.full_tensor().detach()
    for reduction in ("mean", "sum", "none"):
        want = cross_entropy(whole.flatten(0, 1), y.flatten(), reduction=reduction)
        got = vocabulary_cross_entropy(scores, y, reduction=reduction)
        assert torch.allclose(got.reshape(-1), want.reshape(-1), rtol=0, atol=1e-13)
    if world.size > 1:
        with pytest.raises(ConfigError, match=f"targets must be within {WORDS} classes"):
            vocabulary_cross_entropy(scores, y + WORDS)


def test_dropout_of_whole_activations_is_that_of_one_process(world, make_grid):
    """Ranks of one data coordinate draw alike; what is divided is refused."""
    grid = make_grid(tensor=world.size)
    alone, model = small(drop=0.5), hpc.split(grid, small(drop=0.5), tensor=SMALL)
    for number in range(2):
        torch.manual_seed(11 + number)
        want = alone(rows(number))
        torch.manual_seed(11 + number)
        got = model(rows(number))
        assert torch.allclose(got, want, rtol=0, atol=1e-14)
        assert bool((want == 0).any())
    if world.size == 1:
        return
    torch.manual_seed(20 + world.rank)
    with pytest.raises(CollectiveError, match="generators in different states"):
        model(rows(0))
    divided = hpc.split(grid, small(inside=0.5), tensor=SMALL)
    with pytest.raises(ConfigError, match="dropout draws random numbers for a tensor that is div"):
        divided(rows(0))
    divided.eval()
    divided(rows(0))


def test_different_batches_are_refused(world, make_grid):
    grid = make_grid(tensor=world.size)
    model = hpc.split(grid, small(), tensor=SMALL)
    x = rows(0, count=4)
    model(x)
    if world.size == 1:
        return
    for other in (x.flip(0), x[:2], x.float().double()):  # the same rows in another order, too
        with pytest.raises(CollectiveError, match="given different batches"):
            model(other if world.rank == world.size - 1 else x)


def test_different_doings_are_refused_on_all_ranks(world, make_grid):
    """Of one data coordinate alone: the others are told by the words that gradients carry."""
    if world.size == 1:
        pytest.skip("there is nobody to differ from")
    grid = make_grid(tensor=2 if world.size % 2 == 0 else world.size)
    model = hpc.split(grid, small(), tensor=SMALL)
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 0.1), grid=grid)
    odd = world.rank == world.size - 1
    text = "ranks that hold parts of one model did different"
    if grid.data > 1:  # else samples are weighed against none
        with pytest.raises(CollectiveError, match=text):
            replica.learn(mse, rows(0), rows(1), num_samples=3 if odd else 2)
        replica.zero_grad()
    if odd:
        replica.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(CollectiveError, match=text):
        learn_often(replica)
    replica.close()


def double_mse(out, y):
    return 2 * mse(out, y)


@pytest.mark.parametrize("differs", ["target", "loss function", "in the middle of a window"])
def test_different_losses_are_refused_on_all_ranks(world, make_grid, differs):
    """Ranks that share layers have one loss: of one data coordinate alone it differs."""
    for sizes in grids(world.size)[1:]:
        grid = make_grid(**sizes)
        here = grid.coordinate
        odd = world.rank == world.size - 1
        model = hpc.split(grid, small(), tensor=SMALL)
        accumulate = 2 if differs == "in the middle of a window" else 1
        replica = hpc.distribute(
            world,
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            grid=grid,
            accumulate=accumulate,
        )
        before = {name: value.clone() for name, value in model.state_dict().items()}
        loss_fn = double_mse if differs == "loss function" and odd else mse
        target = rows(1) + 1e-9 * (differs != "loss function" and odd)
        text = "the loss differed" if here.data == grid.data - 1 else "parts of one model did"
        if accumulate > 1:
            assert replica.learn(mse, rows(0), target).reason == "accumulating"
            target = rows(1)
        with pytest.raises(CollectiveError, match=text):
            replica.learn(loss_fn, rows(0), target)
        for name, value in model.state_dict().items():
            assert torch.equal(value.to_local(), before[name].to_local()), name
        replica.zero_grad()
        for _ in range(accumulate):
            done = replica.learn(mse, rows(0), rows(1))
        assert done.moved
        replica.close()
        grid.close()


class Forked(nn.Module):
    """Takes one of two layers of the same shape."""

    def __init__(self):
        super().__init__()
        self.sides = nn.ModuleList([nn.Linear(4, 24) for _ in range(2)])
        self.down, self.side = nn.Linear(24, 4), 0

    def forward(self, x):
        return self.down(torch.tanh(self.sides[self.side](x)))


def test_different_branches_are_refused_on_all_ranks(world, make_grid):
    """Parts of two layers fit together; ranks of other data coordinates may take others."""
    for sizes in grids(world.size)[1:]:
        grid = make_grid(**sizes)
        here = grid.coordinate
        torch.manual_seed(4)
        forked = Forked().double()
        model = hpc.split(grid, forked, tensor={"sides.*": "column", "down": "row"})
        made = torch.optim.SGD(model.parameters(), 0.1)
        replica = hpc.distribute(world, model, made, grid=grid)
        last = here.data == grid.data - 1
        text = "which modules of it were run" if last else "parts of one model did"
        forked.side = int(world.rank == world.size - 1)
        with pytest.raises(CollectiveError, match=text):
            replica.learn(mse, rows(0), rows(1))
        replica.zero_grad()
        forked.side = here.data % 2
        assert replica.learn(mse, rows(here.data), rows(1)).moved
        replica.close()
        grid.close()


def test_parameters_that_come_late_are_refused_on_all_ranks(world, make_grid):
    """On one rank or on all, before distribute and after; put back, training goes on."""
    for sizes in grids(world.size)[1:]:
        grid = make_grid(**sizes)
        odd = world.rank == world.size - 1
        model = hpc.split(grid, small(), tensor=SMALL)
        made = torch.optim.SGD(model.parameters(), 0.1)
        if odd:
            model.late = nn.Linear(4, 4).double()
        with pytest.raises(ConfigError, match=r"late\.weight was added or replaced"):
            hpc.distribute(world, model, made, grid=grid)
        if odd:
            del model.late
        replica = hpc.distribute(world, model, made, grid=grid)
        assert replica.learn(mse, rows(0), rows(1)).moved
        model.late = nn.Linear(4, 4).double()
        with pytest.raises(ConfigError, match=r"rank 0: the parameter late\.weight was added"):
            replica.learn(mse, rows(0), rows(1))
        del model.late
        kept = model.up
        if odd:
            model.up = nn.Linear(4, 24).double()
        last = rf"rank {world.size - 1}: the parameter up\.weight was added or replaced"
        with pytest.raises(ConfigError, match=last):
            replica.learn(mse, rows(0), rows(1))
        model.up = kept
        assert replica.learn(mse, rows(0), rows(1)).moved
        replica.close()
        grid.close()


@pytest.mark.parametrize("shard", [None, "gradients"])
def test_parameters_that_come_late_to_a_stage_are_refused(world, make_grid, shard):
    """On one rank, of the same shape: the pipeline itself looks at shapes."""
    for sizes in grids(world.size)[1:]:
        grid = make_grid(pipeline=sizes["data"], tensor=sizes["tensor"])
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 4)).double()
        patterns = {"0": "column", "2": "row"}
        model = hpc.split(grid, layers, stages="auto", tensor=patterns, shard=shard)
        made = torch.optim.SGD(model.parameters(), 0.1)
        replica = hpc.distribute(world, model, made, grid=grid, micro_batches=2)
        assert replica.learn(mse, rows(0), rows(1)).moved
        layer = [one for one in model.modules() if isinstance(one, nn.Linear)][-1]
        kept = layer.bias
        if world.rank == world.size - 1:
            layer.bias = nn.Parameter(torch.zeros(kept.shape, dtype=torch.float64))
        with pytest.raises(ConfigError, match=r"bias was added or replaced"):
            replica.learn(mse, rows(0), rows(1))
        layer.bias = kept
        assert replica.learn(mse, rows(0), rows(1)).moved
        replica.close()
        grid.close()


def learn_often(replica, loss_fn=mse, dtype=torch.float64):
    for _ in range(8):  # of options a few bits are compared at a time
        replica.learn(loss_fn, rows(0).to(dtype), rows(1).to(dtype))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_and_an_overflow_on_one_rank(world, make_grid, precision):
    """The same steps are left out as with whole layers on every rank."""
    scaling = hpc.precision.LossScaling(init_scale=1024.0) if precision == "fp16" else None
    options = {"precision": precision, "scaling": scaling, "clip_norm": 1.0}

    def run(replica, place, is_bad):
        told = []
        for number in range(4):
            bad = precision == "fp16" and number == 2 and is_bad

            def loss_fn(out, y, factor=float("inf") if bad else 1.0):
                return mse(out, y) * factor

            x = rows(10 * number + place).float()
            done = replica.learn(loss_fn, x, x.cos(), num_samples=2)
            told.append((done.reason, done.scale))
        return told

    for sizes in grids(world.size)[1:]:
        grid = make_grid(**sizes)
        here = grid.coordinate
        one = small().float()
        whole = hpc.distribute(world, one, torch.optim.SGD(one.parameters(), 0.01), **options)
        want = run(whole, here.data, here.data == grid.data - 1)
        whole.close()
        model = hpc.split(grid, small().float(), tensor=SMALL)
        replica = hpc.distribute(
            world, model, torch.optim.SGD(model.parameters(), 0.01), grid=grid, **options
        )
        # Of ranks that share layers only one overflows.
        is_last = here.data == grid.data - 1 and here.tensor == grid.tensor - 1
        assert run(replica, here.data, is_last) == want
        assert [reason for reason, _ in want].count("skipped") == (precision == "fp16")
        assert_equal(model, one, limit=1e-4)
        replica.close()
        grid.close()


def test_steps_that_overflow_for_ever_end_on_all_ranks(world, make_grid):
    """One rank of those that share layers finds what is not finite; it tells the others."""
    grid = make_grid(tensor=world.size)
    model = hpc.split(grid, small().float(), tensor=SMALL)
    scaling = hpc.precision.LossScaling(init_scale=4.0, max_skips=2)
    made = torch.optim.SGD(model.parameters(), 0.01)
    replica = hpc.distribute(world, model, made, grid=grid, precision="fp16", scaling=scaling)
    bad = float("inf") if world.rank == world.size - 1 else 1.0
    with pytest.raises(NonFiniteError, match="steps in a row were skipped"):
        learn_often(replica, lambda out, y: mse(out, y) * bad, dtype=torch.float32)
    replica.close()


def test_nan_on_one_rank_stops_all(world, make_grid):
    for sizes in grids(world.size)[1:]:
        grid = make_grid(**sizes)
        model = hpc.split(grid, small(), tensor=SMALL)
        replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 0.1), grid=grid)
        bad = float("nan") if world.rank == world.size - 1 else 1.0
        with pytest.raises(NonFiniteError):
            replica.learn(lambda out, y, bad=bad: mse(out, y) * bad, rows(0), rows(1))
        replica.close()
        grid.close()


def test_unfrozen_later_and_evaluated(world, make_grid):
    grid = make_grid(tensor=world.size)
    alone, model = small(), small()
    for one in (alone, model):
        one.down.bias.requires_grad_(False)
    model = hpc.split(grid, model, tensor=SMALL)
    made = [torch.optim.SGD(one.parameters(), 0.1) for one in (alone, model)]
    replica = hpc.distribute(world, model, made[1], grid=grid)
    for number in range(2):
        for one in (alone, model):
            one.down.bias.requires_grad_(number == 1)
        made[0].zero_grad()
        mse(alone(rows(number)), rows(number + 5)).backward()
        made[0].step()
        replica.learn(mse, rows(number), rows(number + 5))
    assert_equal(model, alone)
    with torch.no_grad():
        assert torch.allclose(replica(rows(7)), alone(rows(7)), rtol=0, atol=1e-13)
    replica.close()


def test_refused_on_all_ranks(world, make_grid):
    grid = make_grid(tensor=world.size)
    for patterns, text in (
        ({"*.nothing": "row"}, "matches no linear or embedding layer"),
        ({"up": "rows"}, "choose 'column', 'row', 'vocabulary'"),
        (["up"], "must be patterns of names with their kinds"),
        ({}, "must be patterns of names with their kinds"),
    ):
        with pytest.raises(ConfigError, match=text):
            hpc.split(grid, small(), tensor=patterns)
    with pytest.raises(ConfigError, match="build the model on"):
        hpc.split(grid, small, tensor=SMALL)
    if world.size == 1:
        return
    with pytest.raises(ConfigError, match=r"tensor is .* on rank 0 and"):
        hpc.split(grid, small(), tensor={"up": "column"} if world.rank else SMALL)
    with pytest.raises(ConfigError, match="tensor= does not say which layers"):
        hpc.split(grid, small(), shard="parameters")
    model = small()
    early = torch.optim.AdamW(model.parameters())
    hpc.split(grid, model, tensor=SMALL)
    with pytest.raises(ConfigError, match="divided already"):
        hpc.split(grid, model, tensor=SMALL)
    optimizer = torch.optim.AdamW(model.parameters())
    for options, text in (
        ({"wire": "bf16"}, "wire='bf16' with a model that split"),
        ({"precision": "bf16-pure"}, "bf16-pure"),
        ({"grid": None}, "give the grid as well"),
    ):
        with pytest.raises(ConfigError, match=text):
            hpc.distribute(world, model, optimizer, **{"grid": grid, **options})
    with pytest.raises(ConfigError, match="is not a parameter of the divided model"):
        hpc.distribute(world, model, early, grid=grid)
    lamb = hpc.optim.LAMB(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match="treats every element alone"):
        hpc.distribute(world, model, lamb, grid=grid)
    replica = hpc.distribute(world, model, optimizer, grid=grid)
    with pytest.raises(ConfigError, match=r"loss.backward\(\) with divided layers"):
        mse(replica(rows(0)), rows(1)).backward()
    with pytest.raises(ConfigError, match=r"join\(\) with divided layers"), replica.join():
        pass
    replica.close()
