"""Collectives that do not end, under real MPI: the right rank is named, the job ends in time."""

from __future__ import annotations

import re
import sys
import time

import pytest

from hpctrain.faults import EXIT_CODE
from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.launch.commands import HPCTRAIN, clean_environment, run

TIMEOUT_S = 2.0

# A world without torch: three interpreters that import it take five seconds.
HEAD = """
import ctypes, os, re, signal, socket, sys, threading, time
from mpi4py import MPI
from hpctrain.faults import start
from hpctrain.world import RankInfo, World
from hpctrain.world.devices import DeviceInfo
from hpctrain.world.launcher import current_launch
from hpctrain.world.output import write_whole_lines
from hpctrain.world.seeding import Streams
from hpctrain.world.topology import split_communicators

write_whole_lines()
comms, place = split_communicators(MPI.COMM_WORLD)
infos = comms.comm.allgather(RankInfo(
    host=socket.gethostname(), node_rank=place.node_rank, local_rank=place.local_rank, cpus="",
    num_threads=1, device=DeviceInfo(kind="cpu")))
world = World(place=place, comms=comms, launch=current_launch(), mpi="", device=None,
              ranks=tuple(infos), streams=Streams(1, place.rank))
rank, comm = world.rank, world.comm
dog = start(world, timeout_s=TIMEOUT_S)

def call(name, function, *args, watch=dog):
    watch.enter(name)
    try:
        function(*args)
    finally:
        watch.leave()

def allreduce(n, watch=dog):
    call(f"allreduce bucket {n}: layer{n}.weight", comm.allreduce, n, watch=watch)

def ready():
    comm.Barrier()
    if rank == 0:
        print("ready", time.time(), flush=True)

for n in range(3):
    allreduce(n)
"""


@pytest.fixture
def hang(tmp_path):
    """Run a script that hangs from `ready()` on; returns its report."""

    def go(body: str, *, num_ranks: int = 3) -> str:
        path = tmp_path / "train.py"
        path.write_text(HEAD.replace("TIMEOUT_S", str(TIMEOUT_S)) + body)
        done = run(*HPCTRAIN, "run", "-n", str(num_ranks), path)
        ended = time.time()
        assert done.code == EXIT_CODE == 124, done.text
        (began,) = re.findall(r"^ready (\S+)$", done.out, re.MULTILINE)
        assert ended - float(began) < TIMEOUT_S + 5, done.text
        assert done.err.count("hpctrain: watchdog: rank") == 1, done.text
        assert done.err.count("ending all ranks with exit code 124") == 1, done.text
        return done.err

    return go


def test_a_rank_that_sleeps_outside(hang):
    report = hang(
        "def dawdle():\n    time.sleep(60)\nready()\nif rank == 1:\n    dawdle()\nallreduce(3)\n"
    )
    assert "ranks 0,2 have waited" in report
    assert "in 'allreduce bucket 3: layer3.weight' #4 for rank 1 (of 3)" in report
    assert re.search(
        r"rank 1 on \S+ \(process \d+\) is outside; its last call, 'allr.*' #3", report
    )
    assert re.search(r"at \S+train\.py:\d+ in dawdle", report)
    assert re.search(r"  rank 0 waits at \S+train\.py:\d+ in call\n", report)
    missing, _, waiting = report.partition("(waiting):")
    assert "dawdle()\n" in missing
    assert "allreduce(3)\n" in waiting
    assert "runpy" not in report


EARLY = """
import time
import torch
import hpctrain as hpc

with hpc.init(seed=1, device="cpu", num_threads=1) as world:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replica = hpc.distribute(world, model, optimizer, engine="mpi", timeout_s=2)
    for _ in range(3 - world.rank):
        replica.backward(replica(torch.ones(2, 4)).mean())
        replica.step()
"""


def test_a_rank_whose_data_ended_early_is_told_of_join(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(EARLY)
    done = run(*HPCTRAIN, "run", "-n", "2", path)
    assert done.code == EXIT_CODE, done.text
    assert re.search(r"in 'exchange of gradients \(.* for rank 1 \(of 2\)", done.err), done.text
    words = "if rank 1 had no data left while the others had: put the training loop into "
    assert f"{words}`with replica.join():`" in done.err, done.text
    assert re.search(r"  rank 0 waits at \S+train\.py:11 in <module>\n", done.err), done.text


def test_a_rank_that_fails_catches_and_goes_on_to_another_call(hang):
    report = hang(
        "ready()\n"
        "try:\n"
        "    if rank == 2:\n"
        "        raise ValueError('bad sample')\n"
        "    allreduce(3)\n"
        "except ValueError:\n"
        "    pass\n"
        "call('broadcast weights', comm.bcast, 1)\n"
    )
    assert re.search(
        r"rank 2 on \S+ \(process \d+\) is in 'broadcast weights' #4 for [\d.]+ s, while ranks 0-1 "
        r"are in 'allreduce bucket 3: layer3.weight' #4",
        report,
    )
    assert re.search(
        r"calls differ first at #4:\n    ranks 0-1: 'allreduce bucket 3: layer3.weight'\n"
        r"      at \S+train\.py:\d+ in call\n"
        r"    rank 2: 'broadcast weights' \(another call\)\n      at \S+train\.py:\d+ in call\n",
        report,
    )


def test_a_stopped_rank(hang):
    report = hang(
        "ready()\n"
        "if rank == 0:\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "call('barrier', comm.Barrier)\n"
    )
    assert "ranks 1-2 have waited" in report
    assert re.search(r"rank 0 on .* does not reply: .* stopped \(SIGSTOP; `kill -CONT \d+`", report)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("ctypes.PyDLL(None).sleep(60)", "its process sleeps in native code that holds"),
        ("re.match('(a+)+$', 'a' * 60 + 'b')", "its process runs native code that holds"),
    ],
)
def test_a_rank_whose_native_code_holds_the_gil(hang, body, words):
    report = hang(f"ready()\nif rank == 1:\n    {body}\ncall('barrier', comm.Barrier)\n")
    assert "in 'barrier' #4 for rank 1 (of 3)" in report
    assert re.search(rf"rank 1 on .* does not reply: no reply within .*; {words}", report)


def test_threads_lanes_and_a_chain_of_waits(hang):
    # Rank 0 waits for 1 and 2 in a thread, 1 waits for 2 in a group of their own, 2 is the culprit.
    report = hang(
        "part = comm.Split(rank > 0)\n"
        "pair = dog.among([1, 2]) if rank else None\n"
        "ready()\n"
        "if rank == 2:\n"
        "    time.sleep(60)\n"
        "if rank == 1:\n"
        "    time.sleep(0.5)\n"
        "    call('gather of the pair', part.Barrier, watch=pair)\n"
        "worker = threading.Thread(target=allreduce, args=(3,), name='fifo')\n"
        "worker.start()\n"
        "worker.join()\n"
    )
    assert "rank 0 has waited" in report
    assert "in 'allreduce bucket 3: layer3.weight' #4 for ranks 1-2 (of 3)" in report
    assert re.search(r"rank 1 on .*; it is in 'gather of the pair' #1 of ranks 1-2 for", report)
    assert re.search(r"rank 2 on .* is outside; .* ended [\d.]+ s ago\n", report)
    assert "fifo, most recent call last" in report


def test_a_stopped_and_a_sleeping_rank_on_another_node(nodes, tmp_path):
    mpi = mpi_of_this_python()
    path = tmp_path / "train.py"
    path.write_text(
        HEAD.replace("TIMEOUT_S", str(TIMEOUT_S)) + "ready()\n"
        "if rank == 1:\n"
        "    time.sleep(60)\n"
        "if rank == 2:\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "call('barrier', comm.Barrier)\n"
    )
    result = nodes.run(
        "node1",
        mpi.command({"node1": 1, "node2": 2}, [sys.executable, str(path)]),
        timeout_s=40,
        cwd=tmp_path,
        env={**clean_environment(), **nodes.environment(mpi.family)},
        check=False,
    )
    report = result.stdout + result.stderr
    assert "in 'barrier' #4 for ranks 1-2 (of 3)" in report, report
    assert re.search(r"rank 1 on node2 \(process \d+\) is outside; its last call", report), report
    assert re.search(
        r"rank 2 on node2 .* does not reply: no reply within 2 s; it has ended", report
    )
    assert "watchdog's TCP connections fail" not in report
    assert result.returncode == EXIT_CODE, report
