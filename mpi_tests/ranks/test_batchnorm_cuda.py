"""BatchNorm over ranks on a GPU: alone, and several ranks that share one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hpctrain as hpc

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)


@pytest.fixture(scope="module")
def gpu_world():
    with hpc.init(seed=7, device="cuda", allow_shared_device=True) as made:
        yield made


@pytest.mark.parametrize("channels_last", [False, True])
def test_equal_to_one_big_batch(gpu_world, channels_last):
    world = gpu_world
    engine = hpc.connect(world).engine
    sizes = [2 + rank % 3 for rank in range(world.size)]
    torch.manual_seed(0)
    x, weights = (torch.randn(sum(sizes), 4, 5, 3, dtype=torch.float64) for _ in range(2))
    mine, alone = nn.BatchNorm2d(4).double().cuda(), nn.BatchNorm2d(4).double().cuda()
    hpc.optim.sync_batchnorm(engine, mine)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    here = x.split(sizes)[world.rank].cuda().contiguous(memory_format=layout).requires_grad_()
    whole = x.cuda().requires_grad_()
    out, expected = mine(here), alone(whole)
    (out * weights.split(sizes)[world.rank].cuda()).pow(3).sum().backward()
    (expected * weights.cuda()).pow(3).sum().backward()
    assert torch.allclose(out, expected.split(sizes)[world.rank], rtol=1e-9, atol=1e-11)
    assert torch.allclose(here.grad, whole.grad.split(sizes)[world.rank], rtol=1e-9, atol=1e-11)
    total = engine.allreduce_(mine.weight.grad.clone())
    assert torch.allclose(total, alone.weight.grad, rtol=1e-9, atol=1e-11)
    assert torch.allclose(mine.running_var, alone.running_var, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast(gpu_world, dtype):
    engine = hpc.connect(gpu_world).engine
    layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).cuda()
    hpc.optim.sync_batchnorm(engine, layer)
    with torch.autocast("cuda", dtype=dtype):
        out = layer(torch.randn(4, 3, 6, 6, device="cuda"))
    assert out.dtype == dtype
    out.float().square().sum().backward()
    assert layer[1].running_mean.dtype == torch.float32
    assert torch.isfinite(layer[0].weight.grad).all()
