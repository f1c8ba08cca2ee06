"""Plain loops on a GPU: alone, and several ranks that share one."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import NonFiniteError
from hpctrain.replica.equal_ranks import digest
from mpi_tests.models import MODELS, OPTIMIZERS, batch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

STEPS = 8


@pytest.fixture(scope="module")
def gpu_world():
    with hpc.init(seed=7, device="cuda", allow_shared_device=True) as made:
        yield made


def build(name="mlp"):
    torch.manual_seed(5)
    return MODELS[name]().double().cuda()


@pytest.mark.parametrize("options", [{}, {"overlap": True, "bucket_bytes": 1000}])
@pytest.mark.parametrize("name", ["mlp", "branches", "tied"])
def test_a_foreign_loop_is_equal_to_one_process(gpu_world, name, options):
    world = gpu_world
    model, alone = build(name), build(name)
    optimizer, own = OPTIMIZERS["adamw"](model), OPTIMIZERS["adamw"](alone)
    replica = hpc.distribute(world, model, optimizer, **options)
    for step in range(STEPS):
        chunks = [(x.cuda(), y.cuda()) for x, y in batch(step, [3] * world.size)]
        x, y = chunks[world.rank]
        optimizer.zero_grad()
        cross_entropy(model(x, world.rank), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        own.zero_grad()
        for chunk, (x, y) in enumerate(chunks):
            (cross_entropy(alone(x, chunk), y) / world.size).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        own.step()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-9)
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    assert replica.num_steps == STEPS
    replica.close()


def test_a_grad_scaler_of_the_users_own(gpu_world):
    world = gpu_world
    torch.manual_seed(5)
    model = torch.nn.Linear(8, 1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    replica = hpc.distribute(world, model, optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)  # the first steps overflow
    for step in range(40):
        x = torch.full((4, 8), 1.0 + step + world.rank, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**40
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    replica.close()


@pytest.mark.parametrize("plain", [True, False])
def test_nan_is_named_soon_after(gpu_world, plain):
    world = gpu_world
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    replica = hpc.distribute(world, model, optimizer)
    culprit = world.size - 1
    named = None
    for step in range(30):
        x, y = (t.cuda() for t in batch(step, [3] * world.size)[world.rank])
        if step == 5 and world.rank == culprit:
            x[0, 0] = math.nan
        try:
            optimizer.zero_grad()
            loss = cross_entropy(model(x, 0), y)
            loss.backward() if plain else replica.backward(loss)
            optimizer.step()
        except NonFiniteError as error:
            named = str(error)
            break
        torch.cuda.synchronize()  # what is late has arrived
    assert named is not None
    assert "step 5" in named
    assert f"rank {culprit}" in named
    assert step <= 5 + 1 + 4  # found a step later, and read four exchanges after that
    assert len(set(world.comm.allgather(step))) == 1  # all raise together
    replica.close()
