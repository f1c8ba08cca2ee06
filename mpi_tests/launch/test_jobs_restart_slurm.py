"""Jobs that fail and are run again, on a real Slurm with its default patience for silent nodes.

A node that breaks down is called down after five minutes of silence (SlurmdTimeout); the ranks on
the other nodes notice within half a minute and end the job, which nobody but its own script would
run again.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from mpi_tests.cluster.fixtures import do_without
from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.cluster.slurm import Slurm
from mpi_tests.launch.commands import HPCTRAIN
from mpi_tests.launch.desk import LIMIT_S, Desk

pytestmark = pytest.mark.cluster

STEPS, HELD_AT = 40, 12
# The first run stops going on at one step, until somebody fails it.
TRAIN = f"""
import os, socket, sys, time
import torch
import hpctrain as hpc

with hpc.init(seed=1) as world:
    x = torch.arange({STEPS * 4}, dtype=torch.float32).reshape(-1, 1)
    loader = hpc.Loader(world, (x,), global_batch=4)
    model = torch.nn.Linear(1, 1)
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 1e-6))
    saver = hpc.Saver(world, sys.argv[1], replica, loader, every_steps=4)
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    for (inputs,) in saver.resume(num_epochs=1):
        replica.backward(replica(inputs).square().mean(), num_samples=len(inputs))
        replica.step()
        if saver.step >= {HELD_AT} and restart == 0:
            if saver.step == {HELD_AT}:
                host = socket.gethostname()
                print(f"rank {{world.rank}} is {{os.getpid()}} on {{host}}", flush=True)
            time.sleep(1.0)
    if world.rank == 0:
        print(f"finished at step {{saver.step}}", flush=True)
"""
DIES = "import os, signal; print('run', flush=True); os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    if reason := Slurm.why_not():
        do_without(reason)
    with Slurm(3, slurmd_timeout_s=300) as slurm:
        folder = slurm.directory / "restarts"
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        yield Desk(slurm, folder)


def submit(desk: Desk, name: str, *more: str) -> str:
    mpi = mpi_of_this_python()
    size = ["--nodes", "2", "--ranks-per-node", "1", "--cpus-per-rank", "1"]
    words = ["--name", name, "--mpi", mpi.srun_plugin, *size, "--requeue", "3", *more]
    (job,) = desk.submit(*words, "--", *HPCTRAIN, "run", "train.py", name)
    return job


def held(desk: Desk, job: str) -> dict[int, tuple[int, str]]:
    """By rank: process and host, once both ranks wait for what happens to them."""
    desk.wait_for(job, " is ", 2)
    found = re.findall(r"^rank (\d+) is (\d+) on (\w+)$", desk.log(job), re.MULTILINE)
    return {int(rank): (int(pid), host) for rank, pid, host in found}


def left_in_memory(desk: Desk, hosts: list[str]) -> list[str]:
    return [
        f"{host}: {name}"
        for host in hosts
        for name in desk.slurm.nodes.run(host, ["ls", "/dev/shm"], timeout_s=20).stdout.split()
    ]


def test_a_killed_rank_costs_a_few_steps_and_its_node_is_left_out(desk: Desk) -> None:
    job = submit(desk, "killed")
    ranks = held(desk, job)
    process, host = ranks[1]
    assert left_in_memory(desk, [host for _, host in ranks.values()])  # or this shows nothing
    os.kill(process, signal.SIGKILL)
    desk.wait_for(job, f"finished at step {STEPS}", 1)
    (row,) = desk.ended(job)
    log = desk.log(job)
    assert (row["state"], row["exit_code"], row["restarts"]) == ("COMPLETED", 0, 1), log
    assert "exit code 137" in log
    assert f"the restart keeps away from {host}" in log
    assert desk.slurm.job(job)["ExcNodeList"] == host
    assert host not in log.rpartition("hpctrain job: nodes: ")[2].splitlines()[0]
    assert "going on from step" in log
    assert left_in_memory(desk, [host for _, host in ranks.values()]) == [], log
    assert not list((desk.folder / "logs").glob(".restarts-*"))


def test_a_lost_node_is_noticed_left_out_and_the_job_runs_again(desk: Desk) -> None:
    job = submit(desk, "lost")
    ranks = held(desk, job)
    batch_host = desk.slurm.job(job)["BatchHost"]
    (host,) = {host for _, host in ranks.values()} - {batch_host}
    desk.slurm.power_off(host, tell=False)
    try:
        desk.wait_for(job, "the restart keeps away from", 1)
        shown = desk.slurm.job(job)
        assert (shown["ExcNodeList"], shown["Restarts"]) == (host, "1"), desk.log(job)
        assert "exit code 137" in desk.log(job)
        # What Slurm finds out by itself after its five minutes: until then the job is completing.
        down = ["scontrol", "update", f"nodename={host}", "state=down", "reason=test"]
        desk.slurm.run(down, timeout_s=LIMIT_S)
        desk.wait_for(job, f"finished at step {STEPS}", 1)
        (row,) = desk.ended(job)
        assert (row["state"], row["exit_code"]) == ("COMPLETED", 0), desk.log(job)
        assert "going on from step" in desk.log(job)
    finally:
        desk.slurm.power_on(host)
    desk.slurm.clear()


def test_a_job_that_always_dies_is_not_run_for_ever(desk: Desk) -> None:
    words = ["--mpi", "none", "--requeue", "5", "--", "python3", "-c", DIES]
    (job,) = desk.submit("--name", "dies", *words)
    desk.wait_for(job, "not run again: no new checkpoint since the last restart", 1)
    (row,) = desk.ended(job)
    assert (row["state"], row["exit_code"], row["restarts"]) == ("FAILED", 137, 1), desk.log(job)
    assert desk.log(job).count("run\n") == 2


def test_submissions_at_once_run_their_own_commands(desk: Desk) -> None:
    plain = ["job", "submit", "--quiet", "--time", "5m", "--mpi", "none", "--name", "many"]
    state = {"XDG_STATE_HOME": str(desk.folder / "state")}
    started = [
        desk.slurm.popen(
            [*HPCTRAIN, *plain, "--", "echo", f"this is {index}."], cwd=desk.folder, env=state
        )
        for index in range(8)
    ]
    jobs = []
    for process in started:
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, out
        jobs.append(next(line for line in out.splitlines() if line.isdecimal()))
    assert len(set(jobs)) == 8
    for index, job in enumerate(jobs):
        desk.ended(job)
        deadline = time.monotonic() + LIMIT_S
        while f"this is {index}." not in desk.log(job) and time.monotonic() < deadline:
            time.sleep(0.3)
        assert f"\nthis is {index}.\n" in desk.log(job)
