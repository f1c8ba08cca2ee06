"""A sweep as jobs of a real Slurm: submitted, collected when they end, a failed one told."""

from __future__ import annotations

import json
import os
import shlex
import sys

import pytest

from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.launch.commands import HPCTRAIN, ROOT, clean_environment

FULL = bool(os.environ.get("MPI_TESTS_FULL"))
SCRIPT = """
import sys

import torch

import hpctrain as hpc

with hpc.init(seed=7, device="cpu") as world:
    if "fused" in world.bench.asked.values:
        sys.exit("no fused optimizer here")
    share = world.bench.global_batch(16) // world.size
    model = torch.nn.Linear(64, 64)
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    while True:
        loss = replica(torch.randn(share, 64)).square().mean()
        replica.backward(loss, num_samples=share)
        replica.step()
"""


@pytest.mark.skipif(not FULL, reason="four jobs on two nodes; MPI_TESTS_FULL=1 runs them")
def test_a_sweep_over_nodes_is_submitted_and_collected(slurm):
    folder = slurm.directory / "bench"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    env = clean_environment({"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder)})
    plugin = mpi_of_this_python().srun_plugin
    words = f"bench submit --node-counts 1,2 --ranks-per-node 2 --cpus-per-rank 1 --mpi {plugin} "
    words += "--time 5m --repeats 1 --steps 3 --warmup 1 train.py"

    def hpctrain(text):
        return slurm.run(
            [*HPCTRAIN, *shlex.split(text)], cwd=folder, timeout_s=280, env=env, check=False
        )

    submitted = hpctrain(words)
    assert len(submitted.stdout.split()) == 3, submitted.stdout + submitted.stderr
    collected = hpctrain("bench collect bench-scale --wait 240")
    said = collected.stdout + collected.stderr
    assert collected.returncode == 1, said
    result = json.loads((folder / "bench-scale" / "result.json").read_text())
    rows = {row["name"]: row for row in result["scale"]["points"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "alone 1x1": "ok",
        "node 1x2": "failed",
        "auto 2x1": "ok",
        "auto 4x1": "ok",
    }, said
    assert "no fused optimizer here" in rows["node 1x2"]["why"]
    assert (rows["auto 4x1"]["num_nodes"], rows["auto 4x1"]["samples_per_step"]) == (2, 64)
    assert sys.executable in (folder / "logs").glob("*.sh").__next__().read_text()
