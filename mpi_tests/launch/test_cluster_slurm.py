"""The private Slurm schedules and starts jobs as a real one does, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from mpi_tests.cluster.claim import start_time
from mpi_tests.cluster.command import ClusterError, run_command
from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.cluster.slurm import Slurm

LIMIT_S = 30

RANKS = """
import json, os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
everything = world.gather([socket.gethostname(), node.size, os.environ["SLURM_JOB_ID"]])
if world.rank == 0:
    print(json.dumps(everything))
"""


def check_ranks(said: str) -> None:
    """Four ranks of one job, two on each of two nodes."""
    hosts, sizes, jobs = zip(*json.loads(said), strict=True)
    assert len(hosts) == 4
    assert sorted(hosts.count(host) for host in set(hosts)) == [2, 2]
    assert set(sizes) == {2}
    assert len(set(jobs)) == 1


def processes_with(slurm: Slurm, program: str) -> dict[int, str]:
    """What runs on the nodes once the program does; a job is RUNNING before its script is."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        running = slurm.nodes.processes()
        if any(program in line for line in running.values()):
            return running
    pytest.fail(f"{program} does not run after {LIMIT_S} s, only {running}")


def test_nodes_are_idle_with_their_gpus(slurm: Slurm) -> None:
    command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T %c %G"]
    lines = slurm.run(command, timeout_s=LIMIT_S).stdout.splitlines()
    assert [line.strip() for line in lines] == [f"node{i} idle 4 gpu:2" for i in (1, 2, 3)]
    assert slurm.nodes.hosts == ("node1", "node2", "node3", "head")


def test_srun_starts_one_mpi_job(slurm: Slurm) -> None:
    plugin = mpi_of_this_python().srun_plugin
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", f"--mpi={plugin}"]
    check_ranks(slurm.run([*command, sys.executable, "-c", RANKS], timeout_s=LIMIT_S).stdout)


def test_mpirun_starts_one_mpi_job_inside_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(RANKS, encoding="utf-8")
    mpi = mpi_of_this_python()
    options = "--allow-run-as-root --bind-to none" if mpi.family == "openmpi" else ""
    script = f"#!/bin/sh\n{mpi.mpirun} {options} -n 4 {sys.executable} {program}\n"
    # Hydra starts its proxies with srun; the site's default, PMIx, would reach MPICH beside PMI.
    env = {"SLURM_MPI_TYPE": "none"} if mpi.family == "mpich" else {}
    job = slurm.sbatch(script, ["--nodes=2", "--ntasks-per-node=2"], env=env)
    slurm.wait(job, {"COMPLETED"}, timeout_s=LIMIT_S)
    check_ranks(slurm.output(job))


def test_tasks_get_the_gpus_they_asked_for(slurm: Slurm) -> None:
    show = 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"'
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--mpi=none"]
    said = slurm.run([*command, "sh", "-c", show], timeout_s=LIMIT_S).stdout
    lines = sorted(line.split() for line in said.splitlines())
    assert len({host for host, _ in lines}) == 2
    assert [gpus for _, gpus in lines] == ["0,1", "0,1"]


def test_sbatch_runs_a_script_to_its_end(slurm: Slurm, tmp_path: Path) -> None:
    script = '#!/bin/sh\necho "$SLURM_JOB_NUM_NODES on $(hostname) with $GIVEN"\npwd\n'
    job = slurm.sbatch(script, ["--nodes=3"], env={"GIVEN": "this"})
    assert slurm.wait(job, timeout_s=LIMIT_S) == "COMPLETED"
    assert slurm.output(job) == f"3 on node1 with this\n{slurm.directory}/jobs\n"
    assert slurm.job(job)["ExitCode"] == "0:0"
    elsewhere = slurm.sbatch("#!/bin/sh\npwd\n", ["--output=out"], cwd=tmp_path)
    slurm.wait(elsewhere, {"COMPLETED"}, timeout_s=LIMIT_S)
    assert (tmp_path / "out").read_text(encoding="utf-8") == f"{tmp_path}\n"


def test_waiting_fails_with_the_output_or_at_the_limit(slurm: Slurm) -> None:
    job = slurm.sbatch("#!/bin/sh\necho broken\nexit 3\n")
    with pytest.raises(ClusterError, match=r"(?s)is FAILED at its end, not COMPLETED.*broken"):
        slurm.wait(job, {"COMPLETED"}, timeout_s=LIMIT_S)
    assert slurm.job(job)["ExitCode"] == "3:0"
    job = slurm.sbatch("#!/bin/sh\nexec sleep 300\n")
    assert slurm.wait(job, {"RUNNING"}, timeout_s=LIMIT_S) == "RUNNING"
    with pytest.raises(ClusterError, match=r"is RUNNING after 0.3 s"):
        slurm.wait(job, timeout_s=0.3)
    slurm.clear()
    assert slurm.wait(job, timeout_s=LIMIT_S) == "CANCELLED"


def test_exit_status_75_requeues(slurm: Slurm) -> None:
    count = "${SLURM_RESTART_COUNT:-0}"
    script = f'#!/bin/sh\necho "start {count}"\n[ "{count}" = 1 ] || exit 75\n'
    job = slurm.sbatch(script, ["--open-mode=append"])
    slurm.wait(job, {"COMPLETED"}, timeout_s=LIMIT_S)
    assert slurm.output(job) == "start 0\nstart 1\n"


def test_another_slurm_comes_and_goes_with_its_jobs(slurm: Slurm) -> None:
    with Slurm(1, cpus=2, gpus=0) as other:
        directory = other.nodes.directory
        job = other.sbatch("#!/bin/sh\nexec sleep 300\n")
        other.wait(job, {"RUNNING"}, timeout_s=LIMIT_S)
        running = processes_with(other, "sleep 300")
        for program in ("munged", "slurmctld", "slurmd", "slurmstepd"):
            assert any(program in line for line in running.values()), program
    assert not {pid: line for pid, line in running.items() if start_time(pid) is not None}
    assert not directory.exists()
    assert directory.name not in run_command(["ip", "netns", "list"], timeout_s=LIMIT_S).stdout
    slurm.run(["scontrol", "ping"], timeout_s=LIMIT_S)


def test_a_failed_start_shows_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := Slurm.why_not():
        pytest.skip(reason)
    broken = "mpi_tests.cluster.slurm_config.SLURM"
    monkeypatch.setattr(broken, "ClusterName=test\nNoSuchOption=1\n")
    with pytest.raises(ClusterError, match="NoSuchOption"), Slurm(1):
        pytest.fail("Slurm started with a broken configuration")
