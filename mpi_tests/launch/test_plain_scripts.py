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
        if not (world.rank == 1 and step == LEFT_OUT):
            optimizer.step()
        if world.rank == 1 and step == TWICE:
            optimizer.step()
print("trained to the end")
"""


def train(folder, options, *, left_out=-1, twice=-1):
    path = folder / "train.py"
    text = SCRIPT.replace("OPTIONS", options).replace("LEFT_OUT", str(left_out))
    path.write_text(text.replace("TWICE", str(twice)))
    return run(*HPCTRAIN, "run", "-n", "2", path, timeout_s=60)


@pytest.mark.parametrize(
    "options", ["update='sharded'", "update='replicated'", "bucket_bytes=256", "engine='torch'"]
)
def test_a_step_that_one_rank_leaves_out_ends_the_job(tmp_path, options):
    done = train(tmp_path, options, left_out=2)
    assert done.code != 0
    assert "the ranks are not in the same step" in done.text
    assert "trained to the end" not in done.text


def test_a_step_too_many_ends_the_job(tmp_path):
    done = train(tmp_path, "update='replicated'", twice=2)
    assert done.code != 0
    assert "the ranks are not in the same step" in done.text


@pytest.mark.parametrize("steps", [{"left_out": 5}, {"twice": 5}])
def test_the_last_step_counts_too(tmp_path, steps):
    done = train(tmp_path, "update='replicated'", **steps)
    assert done.code != 0
    assert "their weights differ" in done.text
    assert "trained to the end" not in done.text


def test_equal_ranks_end_well(tmp_path):
    done = train(tmp_path, "update='replicated'")
    assert done.code == 0
    assert done.text.count("trained to the end") == 2
