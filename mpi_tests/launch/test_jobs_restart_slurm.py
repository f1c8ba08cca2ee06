"""Jobs that fail and are run again, on a real Slurm with its default patience for silent nodes.

A node that breaks down is called down after five minutes of silence (SlurmdTimeout); the ranks on
the other nodes notice within half a minute and end the job, which nobody but its own script would
run again.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from mpi_tests.cluster.fixtures import do_without
from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.cluster.slurm import Slurm
from mpi_tests.full import slow
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
# A training from a file, for its run directory's lock.
PARTS = """
import time
import torch

def model():
    return torch.nn.Linear(1, 1)

def data():
    x = torch.randn(64, 1)
    return x, x

def slow(trainer, batch):
    import os
    inputs, targets = batch
    loss = (trainer.replica(inputs) - targets).square().mean()
    trainer.replica.backward(loss, num_samples=trainer.loader.num_samples)
    trainer.update("model")
    print("under way", flush=True)
    if os.environ.get("HOLD"):
        time.sleep(1.0)
    return loss.detach()
"""
FILE = """
model.build = "parts:model"
data.build = "parts:data"
train = { global_batch = 8, epochs = 4, step = "parts:slow", seed = 1 }
optimizer.lr = 0.01
logging.directory = "locked"
"""
DIES = "import os, signal; print('run', flush=True); os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    if reason := Slurm.why_not():
        do_without(reason)
    with Slurm(3, slurmd_timeout_s=300) as slurm:
        folder = slurm.directory / "restarts"
        folder.mkdir()
        for name, text in {"train.py": TRAIN, "parts.py": PARTS, "file.toml": FILE}.items():
            (folder / name).write_text(text)
        yield Desk(slurm, folder)


def submit(desk: Desk, name: str, *more: str) -> str:
    mpi = mpi_of_this_python()
    size = ["--nodes", "2", "--ranks-per-node", "1", "--cpus-per-rank", "1"]
    how = more or ("--mpi", mpi.srun_plugin)
    words = ["--name", name, *how, *size, "--requeue", "3"]
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
    assert "resuming from step" in log
    assert left_in_memory(desk, [host for _, host in ranks.values()]) == [], log
    assert not list((desk.folder / "logs").glob(".restarts-*"))


@slow
def test_a_rank_killed_under_mpirun_is_restarted_too(desk: Desk) -> None:
    mpi = mpi_of_this_python()
    words = ["--template", "slurm-mpirun", "--mpi", mpi.family]
    words += ["--env", "OMPI_ALLOW_RUN_AS_ROOT=1", "--env", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
    job = submit(desk, "mpirun", *words)
    process, host = held(desk, job)[1]
    os.kill(process, signal.SIGKILL)
    desk.wait_for(job, f"finished at step {STEPS}", 1)
    (row,) = desk.ended(job)
    assert (row["state"], row["restarts"]) == ("COMPLETED", 1), desk.log(job)
    assert f"the restart keeps away from {host}" in desk.log(job)


def test_the_next_job_does_not_wait_for_the_lock_of_a_killed_one(desk: Desk) -> None:
    def submit_on(host: str, *more: str) -> str:
        words = ["--name", "locked", f"--directive=--nodelist={host}", *more]
        (job,) = desk.submit(*words, "--", *HPCTRAIN, "train", "file.toml")
        return job

    first = submit_on("node1", "--env", "HOLD=1")
    desk.wait_for(first, "under way", 2)
    second = submit_on("node2", "--after", first, "--after-kind", "any")
    assert (desk.folder / "locked" / "run.lock").exists()
    # Nobody can say goodbye: neither the ranks nor the script.
    desk.slurm.run(["scancel", "--full", "--signal=KILL", first], timeout_s=LIMIT_S)
    (row,) = desk.ended(second)
    assert (row["state"], row["exit_code"]) == ("COMPLETED", 0), desk.log(second)
    assert desk.slurm.job(first)["JobState"] in ("CANCELLED", "FAILED")


def test_a_snapshot_runs_what_was_submitted(desk: Desk) -> None:
    (desk.folder / "told.py").write_text("TEXT = 'submitted'\n")
    (desk.folder / "say.py").write_text("import told, os\nprint(told.TEXT, os.getcwd())\n")
    words = ["--name", "copy", "--mpi", "none", "--snapshot", "--directive=--begin=now+3"]
    (job,) = desk.submit(*words, "--", sys.executable, "say.py")
    (desk.folder / "told.py").write_text("TEXT = 'edited'\n")
    (row,) = desk.ended(job)
    assert row["state"] == "COMPLETED", desk.log(job)
    assert f"\nsubmitted {desk.folder}\n" in desk.log(job)


def idle_again(desk: Desk, host: str) -> None:
    """Wait until the job's script has left its node: Slurm counts a node as lost much later."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        words = ["scontrol", "--oneliner", "show", "node", host]
        shown = desk.slurm.run(words, timeout_s=LIMIT_S)
        if " State=IDLE " in shown.stdout:
            return
        time.sleep(0.2)
    pytest.fail(f"{host} is not idle after {LIMIT_S} s: {shown.stdout}")


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
        idle_again(desk, batch_host)
        # What Slurm finds out by itself after its five minutes: until then the job is completing.
        down = ["scontrol", "update", f"nodename={host}", "state=down", "reason=test"]
        desk.slurm.run(down, timeout_s=LIMIT_S)
        desk.wait_for(job, f"finished at step {STEPS}", 1)
        (row,) = desk.ended(job)
        assert (row["state"], row["exit_code"]) == ("COMPLETED", 0), desk.log(job)
        assert "resuming from step" in desk.log(job)
    finally:
        desk.slurm.power_on(host)
    desk.slurm.clear()


@slow
def test_a_job_that_always_dies_is_not_run_for_ever(desk: Desk) -> None:
    words = ["--mpi", "none", "--requeue", "5", "--", "python3", "-c", DIES]
    (job,) = desk.submit("--name", "dies", *words)
    desk.wait_for(job, "not run again: no new checkpoint since the last restart", 1)
    (row,) = desk.ended(job)
    assert (row["state"], row["exit_code"], row["restarts"]) == ("FAILED", 137, 1), desk.log(job)
    assert desk.log(job).count("run\n") == 2


@slow
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
