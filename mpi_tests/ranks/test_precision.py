"""Loss scaling: an overflow on one rank is skipped by all, as one process with torch.amp does."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import NonFiniteError
from hpctrain.replica import HorovodTraining
from hpctrain.replica.equal_ranks import digest
from mpi_tests.built import BUILT
from mpi_tests.models import MODELS, OPTIMIZERS, batch

STEPS = 12
SCALING = hpc.precision.LossScaling(init_scale=1024.0, growth_interval=3, max_skips=5)
WAYS = [*BUILT, *(["horovod-fusion"] if "horovod" in BUILT else [])]


def bad_steps(size):
    """Which rank's loss is infinite in which step: two in a row, one alone."""
    return {3: size - 1, 4: 0, 9: size // 2}


def sizes_of(part, size):
    return [1 + (rank + part) % 3 for rank in range(size)]


def build(name="mlp", dtype=torch.float64):
    torch.manual_seed(5)
    return MODELS[name]().to(dtype)


def distribute(world, engines, model, optimizer, way="mpi", **options):
    fusion = HorovodTraining(fusion="horovod") if way == "horovod-fusion" else None
    engine = engines[way.removesuffix("-fusion")]
    return hpc.distribute(world, model, optimizer, engine=engine, horovod=fusion, **options)


def loss_of(model, step, part, rank, size, dtype=torch.float64):
    x, y = batch(step * 5 + part, sizes_of(part, size))[rank]
    loss = cross_entropy(model(x.to(dtype), rank), y)
    return loss * math.inf if bad_steps(size).get(step) == rank else loss, len(y)


def train_together(world, replica, accumulate=1, dtype=torch.float64, steps=range(STEPS)):
    """What each step told, and a digest of the weights after it."""
    told = []
    for step in steps:
        for part in range(accumulate):
            loss, count = loss_of(replica, step, part, world.rank, world.size, dtype)
            replica.backward(loss, num_samples=count)
            done = replica.step()
        told.append((done.skipped, done.reason, done.scale, digest(replica.model.parameters())))
        assert bool(done) != done.skipped
    return told


def train_alone(model, optimizer, size, accumulate=1, clip_norm=None, dtype=torch.float64):
    """One process with torch's own scaler: which steps it skipped, and the scale of each."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    told = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = sum(sum(sizes_of(part, size)) for part in range(accumulate))
        for part in range(accumulate):
            for rank in range(size):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss, count = loss_of(model, step, part, rank, size, dtype)
                scaler.scale(loss * (count / total)).backward()
        scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        before = digest(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        told.append((digest(model.parameters()) == before, scale))
    return told, scaler


def assert_equal(world, model, alone, told, expected, tolerance=1e-9):
    assert all(other == told for other in world.comm.allgather(told)), "ranks differ"
    assert [(skipped, scale) for skipped, _, scale, _ in told] == expected
    assert [step for step, one in enumerate(told) if one[0]] == sorted(bad_steps(world.size))
    assert all((reason == "skipped") == skipped for skipped, reason, _, _ in told)
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=tolerance), name


# Double precision is left alone by autocast: what is scaled, skipped and unscaled can be compared
# without the rounding of float16.
@pytest.mark.parametrize(
    ("way", "name", "options"),
    [
        *[(way, "mlp", {}) for way in WAYS],
        *[(way, "branches", {"accumulate": 3, "clip_norm": 0.1}) for way in (WAYS[0], WAYS[-1])],
        ("mpi", "transformer", {"overlap": True, "bucket_bytes": 500}),
    ],
)
def test_all_ranks_skip_where_one_process_would(world, engines, way, name, options):
    model, alone = build(name), build(name)
    optimizer, own = OPTIMIZERS["adamw"](model), OPTIMIZERS["adamw"](alone)
    replica = distribute(
        world, engines, model, optimizer, way, precision="fp16", scaling=SCALING, **options
    )
    accumulate = options.get("accumulate", 1)
    told = train_together(world, replica, accumulate)
    expected, scaler = train_alone(
        alone, own, world.size, accumulate, clip_norm=options.get("clip_norm")
    )
    assert_equal(world, model, alone, told, expected)
    theirs = scaler.state_dict()
    mine = replica.state_dict()["scaler"]
    assert {key: mine[key] for key in ("scale", "_growth_tracker")} == {
        key: theirs[key] for key in ("scale", "_growth_tracker")
    }
    assert replica.num_skipped == mine["num_skipped"] == len(bad_steps(world.size))
    assert replica.num_steps == STEPS
    replica.close()


def test_float16_arithmetic_trains_as_torch_amp_does(world, engines):
    model, alone = (build(dtype=torch.float32) for _ in range(2))
    optimizer, own = OPTIMIZERS["sgd"](model), OPTIMIZERS["sgd"](alone)
    replica = distribute(world, engines, model, optimizer, precision="fp16", scaling=SCALING)
    told = train_together(world, replica, dtype=torch.float32)
    expected, _ = train_alone(alone, own, world.size, dtype=torch.float32)
    # Shares of a batch round float16 gradients differently: 2**-11 of values around 0.1.
    assert_equal(world, model, alone, told, expected, tolerance=5e-4)
    replica.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-pure"])
def test_the_model_runs_in_half_precision_and_answers_in_float32(world, engines, precision):
    model = build(dtype=torch.float32)
    replica = distribute(
        world, engines, model, OPTIMIZERS["adamw"](model), precision=precision, clip_norm=1.0
    )
    seen = []
    model.layers[0].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    for step in range(3):
        loss, count = loss_of(replica, step, 0, world.rank, world.size, torch.float32)
        assert loss.dtype == torch.float32
        replica.backward(loss, num_samples=count)
        done = replica.step()
        assert done.norm > 0
        assert (done.scale is None) == (precision != "fp16")
        assert done.learning_rate == 0.02
        assert done.learning_rates == (0.02, 0.05)
    assert set(seen) == {torch.float16 if precision == "fp16" else torch.bfloat16}
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    assert precision in replica.describe()
    with replica.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}.get(
        precision, torch.float32
    )
    replica.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_collapsing_scale_ends_the_run_on_all_ranks(world, engines, overlap):
    model = build("transformer")
    replica = distribute(
        world,
        engines,
        model,
        OPTIMIZERS["adamw"](model),
        precision="fp16",
        scaling=SCALING,
        overlap=overlap,
        bucket_bytes=500,
    )
    guilty = world.size - 1
    if world.rank == guilty:
        model.block.linear2.weight.register_hook(
            lambda g: g.index_fill(0, torch.tensor(0), math.nan)
        )
    for step in range(4):
        replica.backward(loss_of(replica, 0, 0, world.rank, world.size)[0])
        assert replica.step().skipped, step
    replica.backward(loss_of(replica, 0, 0, world.rank, world.size)[0])
    expected = (
        rf"^rank {guilty} of {world.size}: the gradient of block.linear2.weight has 16 of 128 "
        r"elements that are inf or NaN; 5 steps in a row were skipped, the last of them step 5"
    )
    with pytest.raises(NonFiniteError, match=expected):
        replica.step()
    replica.close()


def test_a_last_chance_that_goes_well(world, engines):
    model = build()
    replica = distribute(
        world, engines, model, OPTIMIZERS["sgd"](model), precision="fp16", scaling=SCALING
    )
    for step in range(10):
        loss = loss_of(replica, 0, 0, world.rank, world.size)[0]
        replica.backward(loss * math.nan if step % 5 != 4 and world.rank == 0 else loss)
        assert replica.step().skipped == (step % 5 != 4)
    assert replica.num_skipped == 8
    replica.close()


def train_equally(world, replica, steps):
    """Batches of equal size, so that sums are divided by the same from the first step on."""
    told = []
    for step in steps:
        x, y = batch(step, [3] * world.size)[world.rank]
        loss = cross_entropy(replica(x.to(torch.float32), 0), y)
        replica.backward(loss * math.nan if step == 3 and world.rank == 0 else loss)
        done = replica.step()
        told.append((done.skipped, done.scale, done.norm, digest(replica.model.parameters())))
    return told


@pytest.mark.parametrize("precision", ["fp16", "bf16-pure"])
def test_saved_and_loaded_goes_on_bit_for_bit(world, engines, precision):
    steps = range(8) if precision == "fp16" else [0, 1, 2, 4, 5, 6, 7, 8]

    def make():
        model = build(dtype=torch.float32)
        scaling = SCALING if precision == "fp16" else None
        optimizer = OPTIMIZERS["adamw"](model)
        return distribute(
            world, engines, model, optimizer, precision=precision, scaling=scaling, clip_norm=0.1
        )

    through, first, second = make(), make(), make()
    whole = train_equally(world, through, steps)
    train_equally(world, first, steps[:5])
    state = copy.deepcopy(first.state_dict())
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(state)
    assert train_equally(world, second, steps[5:]) == whole[5:]
    plain = OPTIMIZERS["adamw"](build(dtype=torch.float32))
    plain.load_state_dict(state)  # torch leaves scaler and masters out
    for replica in (through, first, second):
        replica.close()


def test_a_gradscaler_takes_over_the_scale(world, engines):
    model = build()
    replica = distribute(
        world, engines, model, OPTIMIZERS["sgd"](model), precision="fp16", scaling=SCALING
    )
    train_together(world, replica, steps=range(5))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.load_state_dict(replica.state_dict()["scaler"])
    scaler.scale(torch.ones(()))  # it takes its state when first used
    assert scaler.get_scale() == replica.state_dict()["scaler"]["scale"] == 512.0
    replica.load_state_dict({**replica.state_dict(), "scaler": scaler.state_dict()})
    replica.close()


def test_without_a_scaler_the_state_has_torchs_form(world, engines):
    model = build()
    replica = distribute(world, engines, model, OPTIMIZERS["adamw"](model), precision="bf16")
    assert replica.state_dict().keys() == {"model", "state", "param_groups"}
    replica.load_state_dict({**replica.state_dict(), "scaler": {"scale": 2.0}})  # of an fp16 run
    replica.close()


def test_ranks_that_run_dry_have_the_others_scale_afterwards(world, engines):
    model = build()
    replica = distribute(
        world, engines, model, OPTIMIZERS["adamw"](model), precision="fp16", scaling=SCALING
    )
    with replica.join():
        for step in range(3 + 2 * world.rank):
            loss = loss_of(replica, 0, 0, world.rank, world.size)[0]
            replica.backward(loss * math.inf if step == 2 * world.rank else loss, num_samples=2)
            replica.step()
    loss = loss_of(replica, 0, 0, world.rank, world.size)[0]
    replica.backward(loss)
    done = replica.step()
    facts = (done.scale, replica.num_steps, replica.num_skipped, digest(model.parameters()))
    assert len(set(world.comm.allgather(facts))) == 1
    # One overflow for each rank, each at a step of its own.
    assert (replica.num_steps, replica.num_skipped) == (2 * world.size + 2, world.size)
    replica.close()


def test_sums_of_large_float16_gradients_do_not_overflow_on_the_wire(world, engines):
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    model = nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for engine in ("mpi", "torch"):
        replica = hpc.distribute(world, model, optimizer, engine=engines[engine])
        replica.backward((weight * 60000.0).sum())  # two of them are beyond float16
        assert weight.grad.tolist() == [60000.0 // 32 * 32] * 3  # float16 has steps of 32 there
        replica.zero_grad()
        replica.close()


def test_hardware_that_differs_takes_rank_zeros_norm(world, engines, monkeypatch):
    monkeypatch.setattr("hpctrain.replica.arguments._hardware", lambda w: f"cpu {w.rank}")
    model = build()
    replica = distribute(world, engines, model, OPTIMIZERS["sgd"](model), clip_norm=0.1)
    told = []
    for step in range(4):
        replica.backward(loss_of(replica, 0, step, world.rank, world.size)[0])
        told.append((replica.step().norm, digest(model.parameters())))
    assert all(other == told for other in world.comm.allgather(told))
    replica.close()


def test_a_lone_skip_ends_no_run_when_the_count_is_old(world, engines):
    model = build()
    optimizer = OPTIMIZERS["adamw"](model)
    replica = distribute(world, engines, model, optimizer, precision="fp16", scaling=SCALING)
    train_together(world, replica, steps=range(3))
    scaler = replica._scale_and_clip.scaler
    scaler._watch.num_in_a_row = SCALING.max_skips - 1  # as a GPU tells it, some steps late
    told = train_together(world, replica, steps=range(3, 6))
    assert [skipped for skipped, *_ in told] == [True, True, False]
    assert scaler.num_in_a_row == 0
    replica.close()
