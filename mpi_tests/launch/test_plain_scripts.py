"""Scripts that know only torch, as real jobs: a rank that leaves a step out is told so."""

from __future__ import annotations

import pytest

from mpi_tests.launch.commands import HPCTRAIN, run

SCRIPT = """
import torch
import hpctrain as hpc

with hpc.init(seed=7, device="cpu", num_threads=1) as world:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    replica = hpc.distribute(world, model, optimizer, timeout_s=10, OPTIONS)
    for step in range(6):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if not (world.rank == 1 and step == 2):
            optimizer.step()
print("trained to the end")
"""


@pytest.mark.parametrize(
    "options", ["update='sharded'", "update='replicated'", "bucket_bytes=256", "engine='torch'"]
)
def test_a_step_that_one_rank_leaves_out_ends_the_job(tmp_path, options):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("OPTIONS", options))
    done = run(*HPCTRAIN, "run", "-n", "2", path, timeout_s=60)
    assert done.code != 0
    assert "the ranks are not in the same step" in done.text
    assert "trained to the end" not in done.text
