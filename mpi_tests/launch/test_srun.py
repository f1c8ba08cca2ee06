"""The launcher check against a real Slurm."""

from __future__ import annotations

import sys

import pytest

from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.launch.commands import HPCTRAIN, clean_environment

SCRIPT = """
import hpctrain as hpc
with hpc.init(seed=3) as world:
    print("place", world.rank, world.size, world.node_rank, world.num_nodes, world.launch.title)
"""

GRID_SCRIPT = """
import os

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import hpctrain as hpc

with hpc.init(seed=7, device="cpu", num_threads=1) as world:
    # Nothing of torch's own way of meeting.
    assert not {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} & set(os.environ)
    grid = hpc.Grid(world, data=2, timeout_s=60)
    torch.manual_seed(3)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    alone = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    model.double(), alone.double().load_state_dict(model.state_dict())
    model = hpc.split(grid, model, shard="parameters")
    replica = hpc.distribute(world, model, torch.optim.AdamW(model.parameters(), 0.01), grid=grid)
    own = torch.optim.AdamW(alone.parameters(), 0.01)
    for _ in range(3):
        rows = slice(0, 4) if world.rank == 0 else slice(4, 6)
        replica.learn(mse_loss, x[rows], y[rows])
        own.zero_grad()
        mse_loss(alone(x), y).backward()
        own.step()
    wanted = alone.state_dict()
    far = max(float((t.full_tensor() - wanted[n]).abs().max()) for n, t in model.named_parameters())
    print("far", world.rank, dist.get_backend(), world.num_nodes, far < 1e-11, flush=True)
    replica.close()
"""


@pytest.fixture
def script(slurm):
    path = slurm.directory / "train.py"
    path.write_text(SCRIPT)
    return path


def environment():
    return {"PYTHONPATH": clean_environment()["PYTHONPATH"]}


def test_srun_with_the_right_plugin_is_one_job(slurm, script):
    plugin = mpi_of_this_python().srun_plugin
    srun = ["srun", f"--mpi={plugin}", "-N", "2", "--ntasks-per-node=2"]
    command = [*srun, *HPCTRAIN, "run", str(script)]
    done = slurm.run(command, timeout_s=90, env=environment())
    places = sorted(line for line in done.stdout.splitlines() if line.startswith("place"))
    assert places == [f"place {r} 4 {r // 2} 2 srun" for r in range(4)], done.stdout


def test_srun_with_the_wrong_plugin_gets_the_cure(slurm, script):
    mpi = mpi_of_this_python()
    command = ["srun", "--mpi=none", "-K", "-N", "2", "-n", "4", sys.executable, str(script)]
    done = slurm.run(command, timeout_s=90, env=environment(), check=False)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert f"srun --mpi={mpi.srun_plugin}" in text, text
    assert "place" not in text


def test_hpctrain_run_inside_sbatch_starts_mpirun(slurm, script):
    command = " ".join([*HPCTRAIN, "run", "-n", "2", str(script)])
    text = f"#!/bin/bash\n#SBATCH -N 1 -n 2\nexec {command}\n"
    job = slurm.sbatch(text, env=environment())
    slurm.wait(job, ["COMPLETED"], timeout_s=90)
    output = slurm.output(job)
    assert output.count("place") == 2, output
    assert "srun" not in output


def test_a_grid_under_srun_needs_no_environment(slurm):
    """The default process group, a sharded model and its training, by srun and python alone."""
    path = slurm.directory / "grid.py"
    path.write_text(GRID_SCRIPT)
    srun = ["srun", f"--mpi={mpi_of_this_python().srun_plugin}", "-K", "-N", "2"]
    command = [*srun, "-n", "2", sys.executable, str(path)]
    done = slurm.run(command, timeout_s=120, env=environment())
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("far"))
    assert told == [f"far {rank} hpctrain 2 True" for rank in range(2)], done.stdout
