"""Digests and the look for NaN on a GPU: the same numbers as on the CPU, and nobody waits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.faults.sentinel import digest, digest_all
from hpctrain.replica.finite import FiniteCheck

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)


def test_a_gpu_has_the_digests_of_the_cpu():
    torch.manual_seed(3)
    tensors = [torch.randn(shape) for shape in ((), (7,), (5, 6), (1000, 1000))]
    tensors += [tensors[3].bfloat16(), tensors[3] > 0, tensors[3].t()]
    there = [tensor.cuda() for tensor in tensors]
    for one, other in zip(tensors, there, strict=True):
        assert digest(one).tolist() == digest(other).tolist()
    assert digest_all(tensors) == digest_all(there)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_nan_is_found_a_step_later_and_nothing_waits():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).cuda()
    check = FiniteCheck(None, num_ranks=1, watches=True)
    inputs = [torch.ones(2, 4, device="cuda") for _ in range(4)]
    inputs[2][0, 0] = torch.nan
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, x in enumerate(inputs):
            loss = model(x).square().mean()
            check.look_at_loss(loss, step=step)
            loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    check.look_at_loss(loss, step=5)
    assert check.finding == "step 2: the loss is nan"
