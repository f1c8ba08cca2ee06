"""Checkpoints of a state on a GPU: copied through pinned memory, loaded on the CPU."""

from __future__ import annotations

import pytest
import torch

import hpctrain as hpc
from hpctrain.errors import CheckpointError
from mpi_tests.checkpoints import bits

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)


def test_a_state_on_the_gpu(world, tmp_path):
    store = hpc.Store(world, world.comm.bcast(tmp_path / "checkpoints", root=0))
    state = {f"w{i}": torch.full((300_000,), float(i), device="cuda") for i in range(4)}
    state |= {"turned": torch.randn(30, 20).cuda().t(), "host": torch.ones(3)}
    state["turned"] = world.comm.bcast(state["turned"].cpu(), root=0).cuda()
    wanted = {name: tensor.cpu().contiguous().clone() for name, tensor in state.items()}
    for _ in range(5):
        state["w1"].add_(1).sub_(1)  # work that the copy has to wait for
    store.save(state, step=1)
    state["w1"].zero_()  # and work that must not reach it
    loaded = store.load()
    assert loaded is not None
    assert bits(loaded.state) == bits(wanted)
    if world.size > 1:
        with pytest.raises(CheckpointError, match="tensor mean has different values"):
            store.save({"mean": torch.full((9,), float(world.rank), device="cuda")}, step=2)
    store.close()
