"""Batches on a GPU: the right numbers, from pinned memory, beside the computation."""

from __future__ import annotations

import pytest
import torch

import hpctrain as hpc

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)


@pytest.mark.parametrize("prefetch", [None, 0, 4])
def test_batches_arrive_whole_however_the_gpu_is_busy(world, prefetch):
    x = torch.arange(4096 * 512, dtype=torch.float32).reshape(4096, 512)
    rows = torch.arange(4096)
    loader = hpc.Loader(
        world, {"x": x, "rows": rows}, global_batch=512, device="cuda", prefetch=prefetch
    )
    seen = []
    busy = torch.randn(2048, 2048, device="cuda")
    for batch in loader:
        for _ in range(5):
            busy = busy @ busy / 2048  # the copies run beside this
        assert batch["x"].device.type == "cuda"
        expected = x.to("cuda")[batch["rows"]]
        assert torch.equal(batch["x"], expected)
        seen += batch["rows"].tolist()
    assert sorted(sum(world.comm.allgather(seen), [])) == list(range(4096))  # noqa: RUF017


def test_python_does_not_wait_for_the_copies(world):
    """Kernels queued before a batch are still running when the batch is handed out."""
    x = torch.randn(64, 1024)
    loader = hpc.Loader(world, x, global_batch=16 * world.size, device="cuda", prefetch=0)
    batches = iter(loader)
    next(batches)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    handed_out = next(batches)
    assert not torch.cuda.current_stream().query()
    assert handed_out.sum().isfinite()


def test_tensors_on_the_gpu_stay_there(world):
    x = torch.arange(40, device="cuda")
    loader = hpc.Loader(world, x, global_batch=8, device="cuda")
    seen = [i for batch in loader for i in batch.tolist()]
    assert sorted(sum(world.comm.allgather(seen), [])) == list(range(40))  # noqa: RUF017
