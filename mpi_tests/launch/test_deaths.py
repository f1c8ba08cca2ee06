"""Ranks that die, and signals that ask them to stop, in real jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from mpi_tests.full import FULL
from mpi_tests.launch.commands import HPCTRAIN, clean_environment, run
from mpi_tests.launch.test_watchdog import HEAD


def mpirun(num_ranks):
    from hpctrain.install.mpi import loaded_mpi, matching_mpirun
    from hpctrain.launch import launch_command

    found, version = matching_mpirun(loaded_mpi(), clean_environment()["PATH"])
    return launch_command(found, version, num_ranks=num_ranks, root=os.geteuid() == 0)


def script_of_a_death(folder, body):
    path = folder / "train.py"
    path.write_text(
        HEAD.replace("TIMEOUT_S", "60")
        + "from hpctrain.world.guard import install_hook\ninstall_hook(current_launch())\nready()\n"
        + f"if rank == 1:\n    time.sleep(0.5)\n    {body}\n"
        + "call('barrier', comm.Barrier)\n"
    )
    return path


def die_under_mpirun(path):
    """What such a job says; nobody else is ever called dead."""
    done = run(*mpirun(3), sys.executable, path, timeout_s=30)
    assert done.code != 0
    assert done.elapsed_s < 10 + 5, done.text  # five seconds to start on a busy machine
    # Those whom the first one ends are not called dead.
    assert len(re.findall("died unexpectedly|failed; ending", done.text)) <= 1, done.text
    return done.text


def test_a_killed_rank_under_bare_mpirun_is_named_by_its_neighbour(tmp_path):
    path = script_of_a_death(tmp_path, "os.kill(os.getpid(), 9)")
    words = r"rank 1 of 3 on \S+ \(process \d+\) died unexpectedly"
    # mpirun ends the others as well, and may be quicker than they are; not as a rule.
    said = [die_under_mpirun(path) for _ in range(5)]
    assert sum(bool(re.search(words, text)) for text in said) >= 2, said


def test_a_failure_under_bare_mpirun_is_never_lost(tmp_path):
    path = script_of_a_death(tmp_path, "raise MemoryError('no room')")
    words = r"rank 1 of 3 on \S+ failed.*\n(.*\n)*MemoryError: no room"
    said = [die_under_mpirun(path) for _ in range(4)]
    assert all(re.search(words, text) for text in said), said


def test_ranks_that_end_well_are_not_called_dead(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD.replace("TIMEOUT_S", "60") + "time.sleep(0.3 * rank)\n")
    done = run(*mpirun(3), sys.executable, path, timeout_s=30)
    assert (done.code, done.err) == (0, ""), done.text


KILLED_WORKER = """
import hpctrain as hpc
from mpi_tests.datasets import Fragile

if __name__ == "__main__":
    with hpc.init(seed=1, device="cpu", num_threads=1) as world:
        data = Fragile(40, "kill")
        for _ in hpc.Loader(world, data, global_batch=4, shuffle=False, num_workers=1):
            pass
        world.comm.Barrier()
"""


@pytest.mark.skipif(not FULL, reason="slow; the ranks' suite has the essence")
def test_a_killed_loader_worker_ends_the_job_and_leaves_no_memory(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(KILLED_WORKER)
    before = set(os.listdir("/dev/shm"))
    done = run(*HPCTRAIN, "run", "-n", "2", path, timeout_s=120)
    assert done.code == 1, done.text
    assert re.search(r"rank [01] of 2 on \S+ failed; ending all ranks", done.err), done.text
    words = r"DataError: worker 0 of the loader \(process \d+\) ended by SIGKILL"
    assert re.search(words, done.err), done.text
    new = set(os.listdir("/dev/shm")) - before
    assert not [name for name in new if name.startswith(("hpctrain-", "torch_"))]


STOPPABLE = """
import sys, time
from hpctrain.faults.preemption import Preemption
from hpctrain.world.guard import AgreedExit
with Preemption() as asked:
    print("ready", flush=True)
    while asked.requested is None:
        time.sleep(0.02)
    time.sleep(0.5)  # the save
    print("saved at", asked.requested, flush=True)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_hpctrain_run_passes_warnings_on_and_lets_the_ranks_finish(tmp_path, name):
    path = tmp_path / "train.py"
    path.write_text(STOPPABLE)
    with subprocess.Popen(
        [*HPCTRAIN, "run", "-n", "2", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as process:
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=20)
    assert lines == ["ready\n"] * 2
    assert (process.returncode, out) == (0, f"saved at {name}\n" * 2), err
    assert f"{name} passed on to 2 ranks" in err


LEAVE = """
from hpctrain.faults.boundary import Boundary, BoundaryMessage
from hpctrain.faults.preemption import Preemption
from hpctrain.world.guard import AgreedExit
with world, Preemption() as asked:
    boundary = Boundary(world, timeout_s=30, watchdog=dog)
    world.at_exit(dog.stop)
    for step in range(1000):
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        agreed = boundary.meet(BoundaryMessage(signal=asked.requested))
        if agreed.signal is not None:
            print("step", step, agreed.signal, "of rank", agreed.signal_by.rank, flush=True)
            comm.Barrier()
            raise AgreedExit(75)
"""


@pytest.mark.parametrize("how", ["hpctrain run", "mpirun"])
def test_a_signal_to_one_rank_lets_all_leave_with_75(tmp_path, how):
    path = tmp_path / "train.py"
    path.write_text(HEAD.replace("TIMEOUT_S", "30") + LEAVE)
    command = (
        [*HPCTRAIN, "run", "-n", "3"] if how == "hpctrain run" else [*mpirun(3), sys.executable]
    )
    done = run(*command, path, timeout_s=30)
    assert done.code == 75, done.text
    assert done.out.count("step 6 SIGUSR2 of rank 1\n") == 3, done.text
    assert "hpctrain:" not in done.err, done.text
