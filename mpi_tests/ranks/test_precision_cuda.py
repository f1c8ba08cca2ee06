"""Precision on a GPU: as torch.amp, without waiting for it, agreed between ranks that share one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import NonFiniteError
from hpctrain.replica.equal_ranks import digest
from mpi_tests.models import MODELS, OPTIMIZERS, batch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

STEPS = 12
SCALING = hpc.precision.LossScaling(init_scale=1024.0, growth_interval=3, max_skips=4)


@pytest.fixture(scope="module")
def gpu_world():
    with hpc.init(seed=7, device="cuda", allow_shared_device=True) as made:
        yield made


def build(name="mlp", dtype=torch.float64):
    torch.manual_seed(5)
    return MODELS[name]().to("cuda", dtype)


def loss_of(model, step, rank, size, dtype=torch.float64, bad=()):
    x, y = batch(step, [3] * size)[rank]
    loss = cross_entropy(model(x.to("cuda", dtype), rank), y.cuda())
    return loss * math.inf if (step, rank) in bad else loss


@pytest.mark.parametrize("optimizer_name", ["adamw", "adamw-fused"])
@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.1}, {"overlap": True, "bucket_bytes": 500}]
)
def test_overflow_on_one_rank_is_skipped_by_all(gpu_world, optimizer_name, options):
    world = gpu_world
    model, alone = build(), build()
    optimizer, own = OPTIMIZERS[optimizer_name](model), OPTIMIZERS[optimizer_name](alone)
    replica = hpc.distribute(world, model, optimizer, precision="fp16", scaling=SCALING, **options)
    bad = {(0, 0), (4, world.size - 1), (5, 0)}
    scaler = torch.amp.GradScaler("cuda", 1024.0, growth_interval=3)
    done, expected = [], []
    for step in range(STEPS):
        replica.backward(loss_of(replica, step, world.rank, world.size, bad=bad))
        done.append(replica.step())
        own.zero_grad()
        for rank in range(world.size):
            loss = loss_of(alone, step, rank, world.size, bad=bad) / world.size
            scaler.scale(loss).backward()
        expected.append(scaler.get_scale())
        scaler.unscale_(own)
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(alone.parameters(), options["clip_norm"])
        scaler.step(own)
        scaler.update()
    told = [(one.skipped, one.scale, one.norm) for one in done]
    assert [step for step, one in enumerate(done) if one.skipped] == [0, 4, 5]
    assert [scale for _, scale, _ in told] == expected
    facts = (repr(told), digest(model.parameters()), replica.num_skipped)
    assert len(set(world.comm.allgather(facts))) == 1
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-9)
    replica.close()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16-pure"])
def test_every_precision_trains(gpu_world, precision):
    world = gpu_world
    before = torch.get_float32_matmul_precision()
    model = build("transformer", torch.float32)
    replica = hpc.distribute(
        world, model, OPTIMIZERS["adamw-fused"](model), precision=precision, clip_norm=1.0
    )
    losses = []
    for _ in range(30):
        loss = loss_of(replica, 0, world.rank, world.size, torch.float32)
        replica.backward(loss)
        replica.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    replica.close()
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_never_waits_for_the_gpu(gpu_world, precision):
    if gpu_world.size > 1:
        pytest.skip("ranks that share a GPU are staged through the host")
    model = build("transformer", torch.float32)
    replica = hpc.distribute(
        gpu_world, model, OPTIMIZERS["adamw-fused"](model), precision=precision, clip_norm=1.0
    )
    x, y = (part.cuda() for part in batch(0, [3])[0])
    x = x.float()

    def step():
        replica.backward(cross_entropy(replica(x, 0), y))
        replica.step()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    replica.close()


@pytest.mark.parametrize("optimizer_name", ["adamw", "adamw-fused"])
def test_a_collapsing_scale_ends_the_run_on_all_ranks(gpu_world, optimizer_name):
    world = gpu_world
    model = build("transformer")
    replica = hpc.distribute(
        world, model, OPTIMIZERS[optimizer_name](model), precision="fp16", scaling=SCALING
    )
    guilty = world.size - 1
    expected = (
        rf"^rank {guilty} of {world.size}: the gradient of block.linear2.weight has 128 of 128"
    )
    replica.backward(loss_of(replica, 0, world.rank, world.size))
    assert replica.step()
    if world.rank == guilty:
        model.block.linear2.weight.register_hook(lambda g: g * math.nan)

    def train():
        for step in range(20):  # it is looked at every 4 steps, one look late
            replica.backward(loss_of(replica, step, world.rank, world.size))
            replica.step()

    with pytest.raises(NonFiniteError, match=expected):
        train()
    assert 4 <= replica.num_skipped <= 13
    replica.close()


def test_a_gradscaler_of_the_users_own(gpu_world):
    world = gpu_world
    model = build(dtype=torch.float32)
    optimizer = OPTIMIZERS["adamw-fused"](model)
    replica = hpc.distribute(world, model, optimizer)
    scaler = torch.amp.GradScaler("cuda", 1024.0, growth_interval=3)
    bad = {(2, world.size - 1)}
    for step in range(6):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(replica, step, world.rank, world.size, torch.float32, bad)
        replica.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    facts = (scaler.get_scale(), digest(model.parameters()))
    assert len(set(world.comm.allgather(facts))) == 1
    assert scaler.get_scale() == 1024.0  # halved once, doubled once
    replica.close()


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}])
def test_a_rank_without_samples_has_the_same_bits(gpu_world, options):
    world = gpu_world
    model = build(dtype=torch.float32)
    replica = hpc.distribute(world, model, OPTIMIZERS["adamw"](model), **options)
    for step in range(9):
        counts = [0 if rank == step % world.size else 3 + rank for rank in range(world.size)]
        x, y = batch(step, [max(1, count) for count in counts])[world.rank]
        count = counts[world.rank] if world.size > 1 else 3
        loss = cross_entropy(replica(x.float().cuda(), world.rank), y.cuda())
        replica.backward(loss, num_samples=count)
        assert replica.step()
        assert len(set(world.comm.allgather(digest(model.parameters())))) == 1, step
    replica.close()


def test_a_lone_skip_ends_no_run(gpu_world):
    world = gpu_world
    model = build()
    replica = hpc.distribute(
        world, model, OPTIMIZERS["adamw-fused"](model), precision="fp16", scaling=SCALING
    )
    # Three skips when it is looked, all well until that is known, and then one more alone.
    bad = {(step, 0) for step in (1, 2, 3, 8)}
    skipped = []
    for step in range(12):
        replica.backward(loss_of(replica, step, world.rank, world.size, bad=bad))
        skipped.append(replica.step().skipped)
    assert [step for step, one in enumerate(skipped) if one] == [1, 2, 3, 8]
    replica.close()
