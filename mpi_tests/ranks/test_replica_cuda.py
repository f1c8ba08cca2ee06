"""Replicas on a GPU: alone, and several ranks that share one (staged through the host)."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.replica.equal_ranks import digest
from mpi_tests.models import MODELS, OPTIMIZERS, batch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

STEPS = 20


@pytest.fixture(scope="module")
def gpu_world():
    with hpc.init(seed=7, device="cuda", allow_shared_device=True) as made:
        yield made


def build(name):
    torch.manual_seed(5)
    return MODELS[name]().double().cuda()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["mlp", "branches", "transformer"])
def test_equal_to_one_process_on_the_same_gpu(gpu_world, name, overlap):
    world = gpu_world
    model, alone = build(name), build(name)
    optimizer, own = OPTIMIZERS["adamw"](model), OPTIMIZERS["adamw"](alone)
    replica = hpc.distribute(world, model, optimizer, overlap=overlap, bucket_bytes=1000)
    sizes = [1 + rank % 3 for rank in range(world.size)]
    digests = []
    for step in range(STEPS):
        chunks = [(x.cuda(), y.cuda()) for x, y in batch(step, sizes)]
        x, y = chunks[world.rank]
        replica.backward(cross_entropy(replica(x, world.rank), y), num_samples=len(y))
        assert replica.step()
        digests.append(digest(model.parameters()))
        own.zero_grad()
        for chunk, (x, y) in enumerate(chunks):
            (cross_entropy(alone(x, chunk), y) * len(y) / sum(sizes)).backward()
        own.step()
    assert all(other == digests for other in world.comm.allgather(digests))
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-9)
    replica.close()


def test_auto_says_what_it_chose(gpu_world):
    connection = hpc.connect(gpu_world)
    expected = {1: "local"}.get(gpu_world.size, "mpi")  # NCCL refuses ranks that share a GPU
    assert connection.engine.name == expected
    assert connection.reason


@pytest.mark.parametrize("engine", ["torch", "horovod"])
def test_nccl_engines_with_one_rank(gpu_world, engine):
    if engine == "horovod":
        pytest.importorskip("horovod", reason="Horovod is not built here")
    if gpu_world.size > 1:
        with pytest.raises(ConfigError, match="share a GPU"):
            hpc.connect(gpu_world, engine)
        return
    model = build("mlp")
    replica = hpc.distribute(gpu_world, model, OPTIMIZERS["sgd"](model), engine=engine)
    before = digest(model.parameters())
    ((x, y),) = batch(0, [4])
    replica.backward(cross_entropy(replica(x.cuda(), 0), y.cuda()), num_samples=4)
    assert replica.step()
    assert digest(model.parameters()) != before
    replica.close()
