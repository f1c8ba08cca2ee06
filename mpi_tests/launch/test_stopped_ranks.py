"""A rank that is stopped (SIGSTOP) right before a collective: it is named, and the job ends.

`stopping.py` has the cases: every collective of the public interface. Every day a few of them run;
`MPI_TESTS_FULL=1` runs all of them, on every engine, under `hpctrain run` and under mpirun.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import indent

import pytest

from hpctrain.engines import probe_horovod
from mpi_tests.full import slow
from mpi_tests.launch import stopping
from mpi_tests.launch.commands import HPCTRAIN, clean_environment, run
from mpi_tests.launch.test_deaths import mpirun

SCRIPT = Path(stopping.__file__)
MARGIN_S = 12.0
"""Looking takes up to 1 s, asking 2 s; the rest is for a busy machine."""
DAILY = (
    "world.comm", "share", "Loader.next", "engine.barrier", "replica.synchronize", "store.save",
    "saver.save_and_wait", "saver.restore", "sentinel.step", stopping.END,
)  # fmt: skip
IN_HOROVODS_QUEUE = ("engine.", "replica.", "sync_batchnorm", "saver.synchronize")
"""A known gap (docs/watchdog.md): handing a tensor to Horovod may wait for Horovod's lock with
Python's own lock held, and then no thread of that process can speak."""
LAUNCHERS = {"hpctrain run": lambda n: [*HPCTRAIN, "run", "-n", str(n)], "mpirun": mpirun}


def launch(launcher):
    words = LAUNCHERS[launcher](2)
    return words if launcher == "hpctrain run" else [*words, sys.executable]


def judge(line):
    """What is wrong with how one case went; nothing where all is well."""
    name, report, seconds = line["case"], line["report"], line["seconds"]
    case = stopping.CASES.get(name)
    if case is not None and case.may_not_wait and seconds < stopping.TIMEOUT_S:
        return []
    first = report.partition("\n")[0]
    wanted = [
        rf"rank 0 has waited [\d.]+ s \(timeout {stopping.TIMEOUT_S:g} s\) in '.*' #\d+ for rank 1",
        "|".join(map(re.escape, case.says.split("|"))) if case is not None else "",
    ]
    wrong = [f"{name}: no {part} in {first!r}" for part in wanted if not re.search(part, first)]
    if not re.search(r"rank 1 on .* does not reply: .*is stopped \(SIGSTOP; `kill", report):
        wrong.append(f"{name}: that rank 1 is stopped is not said: {report!r}")
    if not seconds < stopping.TIMEOUT_S + MARGIN_S:
        wrong.append(f"{name}: {seconds:.1f} s")
    return wrong


def run_cases(launcher, engine, folder, names, timeout_s):
    done = run(*launch(launcher), SCRIPT, engine, folder, *names, timeout_s=timeout_s)
    assert done.code == 0, done.text
    lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert [line["case"] for line in lines] == [*names]
    wrong = [text for line in lines for text in judge(line)]
    assert not wrong, "\n".join(wrong)


def test_a_stopped_rank_is_named_in_time(tmp_path):
    run_cases("hpctrain run", "mpi", tmp_path, DAILY, timeout_s=240)


@slow
@pytest.mark.parametrize("engine", ["mpi", "torch", "horovod"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_stopped_rank_is_named_in_every_collective(tmp_path, launcher, engine):
    names = [*stopping.CASES, stopping.END]
    if engine == "horovod":
        if not probe_horovod().built:
            pytest.skip("Horovod is not built")
        names = [name for name in names if not name.startswith(IN_HOROVODS_QUEUE)]
    run_cases(launcher, engine, tmp_path, names, timeout_s=900)


@pytest.mark.parametrize(
    ("launcher", "name", "says"),
    [
        ("hpctrain run", "saver.save_and_wait", "Saver.save: saving a run"),
        pytest.param("mpirun", "store.save", "Store.save: agree", marks=slow),
        ("mpirun", stopping.END, "the end of `with hpc.init()`"),
    ],
)
def test_a_stopped_rank_ends_the_job(tmp_path, launcher, name, says):
    done = run(*launch(launcher), SCRIPT, "mpi", tmp_path, "--end", name, timeout_s=90)
    ended = time.time()
    assert done.code == 124, done.text
    (began,) = re.findall(r"^ready (\S+)$", done.out, re.MULTILINE)
    assert ended - float(began) < stopping.TIMEOUT_S + MARGIN_S, done.text
    waited = rf"rank 0 has waited .* in '{re.escape(says)}' #\d+ for rank 1"
    assert re.search(waited, done.text), done.text
    assert "ending all ranks with exit code 124" in done.text


BEFORE_MPI = """
import os, signal, time
import torch
import hpctrain as hpc
from hpctrain.world import detect

rank = detect(os.environ).rank
print("ready", time.time(), flush=True)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
hpc.init(seed=1, device="cpu", timeout_s=3)
"""


def test_a_rank_that_is_stopped_before_mpi_starts_ends_the_job(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BEFORE_MPI)
    done = run(*launch("mpirun"), path, timeout_s=90)
    ended = time.time()
    assert done.code not in (0, None), done.text
    # Before MPI there are no names: what is said is where the others wait.
    assert "Timeout (0:00:03)!" in done.text
    assert "in load_mpi" in done.text
    assert ended - max(map(float, re.findall(r"^ready (\S+)$", done.out, re.M))) < 3 + MARGIN_S


def test_a_rank_that_is_stopped_before_init_is_named(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BEFORE_MPI)
    done = run(*HPCTRAIN, "run", "-n", "2", path, timeout_s=90)
    assert done.code == 124, done.text
    assert (
        "TimedOutError: hpctrain.init: timed out after 3 s waiting for rank 1 of 2" in done.err
    ), done.text


STOPPED = """
import os, signal, subprocess, sys, time
import hpctrain as hpc

IGNORES = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
with hpc.init(seed=1, device="cpu", num_threads=1) as world:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", IGNORES])
    world.comm.Barrier()
    print("pids", os.getpid(), child.pid, flush=True)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    world.comm.Barrier()
    time.sleep(120)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_hpctrain_run_ends_stopped_ranks_and_their_children(tmp_path, name):
    path = tmp_path / "train.py"
    path.write_text(STOPPED)
    with subprocess.Popen(
        [*HPCTRAIN, "run", "-n", "2", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as process:
        pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()[1:]]
        wait_until(lambda: "T" in {state_of(pid) for pid in pids})
        began = time.monotonic()
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=30)
        elapsed_s = time.monotonic() - began
    code = 128 + getattr(signal, name)
    assert process.returncode == code, err
    assert elapsed_s < 10, err
    by = "Ctrl-C (SIGINT)" if name == "SIGINT" else name
    assert err.count(f"interrupted by {by}; all ranks ended; exit code {code}") == 1, err
    if name == "SIGTERM":
        assert "rank 1 was stopped (SIGSTOP) and has been resumed" in err
    assert len(pids) == 4
    wait_until(lambda: all(state_of(pid) in ("", "Z", "X") for pid in pids))


SAVED = """
import os, sys, time
import torch
import hpctrain as hpc

with hpc.init(seed=1, device="cpu", num_threads=1) as world:
    x = torch.randn(64, 2)
    loader = hpc.Loader(world, (x,), global_batch=4)
    model = torch.nn.Linear(2, 1)
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 0.1))
    saver = hpc.Saver(world, sys.argv[1], replica, loader)
    for number, (rows,) in enumerate(saver.resume(num_epochs=100000)):
        replica.backward(replica(rows).mean())
        replica.step()
        if number == 1 and world.rank == 0:
            print("training", flush=True)
        time.sleep(0.02)
"""


def test_ctrl_c_reports_one_exit_code_where_a_saver_saves(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"try:\n{indent(SAVED, ' ' * 4)}finally:\n    print('finally')\n")
    with subprocess.Popen(
        [*HPCTRAIN, "run", "-n", "2", str(path), str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as process:
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert out == "finally\n" * 2
    assert process.returncode == 130, err
    assert re.findall(r"exit code (\d+)", err) == ["130"], err
    assert err.count("interrupted by Ctrl-C (SIGINT)") == 1, err
    # What the user did is said before what became of it.
    assert re.search(r"Ctrl-C \(SIGINT\): all ranks get SIGTERM.*\n(.*\n)*.*saved step", err), err
    assert "Traceback" not in err


def state_of(pid):
    """The state letter of a process; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_until(is_so, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
