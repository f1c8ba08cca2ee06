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
