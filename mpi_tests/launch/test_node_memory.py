"""Node-shared memory where there is little of it, after a death, and how much of it is used."""

from __future__ import annotations

import json
import re

import pytest

from mpi_tests.cluster.fixtures import do_without
from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.cluster.nodes import Nodes
from mpi_tests.full import slow
from mpi_tests.launch.commands import HPCTRAIN, ROOT, run

# 20 MiB of weights: three times that for the gradients of two ranks does not fit into 64 MiB.
TRAIN = """
import json, os, signal, sys, torch, hpctrain as hpc
with hpc.init(seed=1, device="cpu", num_threads=1) as world:
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(5)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    try:
        replica = hpc.distribute(world, model, optimizer, engine="mpi")
    except hpc.errors.CollectiveError as error:
        texts = world.comm.allgather(str(error))
        if world.rank == 0:
            print(json.dumps(texts), flush=True)
        sys.exit(0)
    for _ in range(2):
        replica.backward(replica(torch.ones(1, 1024)).mean())
        replica.step()
    if world.rank == 0:
        print(replica.describe(), flush=True)
    world.comm.Barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.comm.Barrier()
"""

# What all ranks hold of our blocks, each page divided by those who map it, and what is their own.
MEASURE = """
import ctypes, gc, json, re, torch, hpctrain as hpc

def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    kib, ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                ours = "hpctrain-" in line
            elif ours and line.startswith("Pss:"):
                kib += int(line.split()[1])
    with open("/proc/self/smaps_rollup") as lines:
        own = next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    return kib, own

def train(world, width, update):
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    replica = hpc.distribute(world, model, optimizer, engine="mpi", update=update)
    before = held()
    for _ in range(2):
        replica.backward(replica(torch.ones(1, width)).mean())
        replica.step()
    # Pages count as this rank's once it has looked at them.
    sum(v.sum() for s in optimizer.state.values() for v in s.values())
    sum(p.grad.sum() for p in model.parameters())
    world.comm.Barrier()
    every = world.comm.allgather((before, held()))
    replica.close()
    return {
        "shared": sum(after[0] for _, after in every) * 1024,
        "own": sum(after[1] - before[1] for before, after in every) * 1024,
    }

with hpc.init(seed=1, device="cpu", num_threads=1) as world:
    train(world, 64, "sharded")  # what a first step loads is not counted
    totals = {update: train(world, 1024, update) for update in ("sharded", "replicated")}
    if world.rank == 0:
        print(json.dumps(totals))
"""


@pytest.fixture
def small_node(tmp_path):
    """One node with a container's usual 64 MiB of /dev/shm."""
    if reason := Nodes.why_not():
        do_without(reason)

    def start(before=""):
        mpi = mpi_of_this_python()
        words = [*HPCTRAIN, "run", "-n", "2", "--quiet", str(script)]
        env = {**nodes.environment(mpi.family), "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        shell = ["sh", "-c", f'{before} exec "$@"', "sh", *words]
        return nodes.run("node1", shell, timeout_s=60, cwd=tmp_path, env=env, check=False)

    script, folder = tmp_path / "train.py", tmp_path / "elsewhere"
    script.write_text(TRAIN)
    folder.mkdir()
    with Nodes(1, shm_size="64m") as nodes:
        start.nodes, start.folder = nodes, folder
        yield start


def test_a_small_dev_shm_and_a_killed_rank(small_node):
    done = small_node()
    text = done.stdout + done.stderr
    why = rf"60\.\d MiB a node, in {small_node.folder} since /dev/shm has [\d.]+ MiB of 64\.0 MiB"
    assert re.search(why, re.sub(r"\s+", " ", done.stdout)), text
    assert done.returncode != 0
    assert "killed" in text.lower(), text
    left = small_node.nodes.run("node1", ["ls", "/dev/shm"], timeout_s=20).stdout
    assert "hpctrain-" not in left
    assert not list(small_node.folder.glob("hpctrain-*"))


def test_no_room_anywhere_is_one_error_on_all_ranks(small_node):
    done = small_node(f"mount -t tmpfs -o size=8m tmpfs {small_node.folder} &&")
    assert done.returncode == 0, done.stdout + done.stderr
    text, other = json.loads(done.stdout.splitlines()[-1])
    assert text == other
    for words in (
        r"no room for 60\.\d MiB of node-shared memory \(gradients\)",
        r"/dev/shm has [\d.]+ MiB of 64\.0 MiB free",
        rf"{small_node.folder} has [\d.]+ MiB of 8\.0 MiB free",
        r"--shm-size.*TMPDIR.*fewer ranks",
    ):
        assert re.search(words, text), text


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=slow)])
def test_a_node_holds_state_and_weights_under_way_once(tmp_path, size):
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    command = [*HPCTRAIN, "run", "-n", str(size), "--quiet", str(script)]
    # torch's allocator must give back at once what was let go, or nothing could be compared.
    done = run(*command, timeout_s=90, env={"MIMALLOC_PURGE_DELAY": "0"})
    assert done.code == 0, done.text
    totals = json.loads(done.out.splitlines()[-1])
    weights = 4 * 1024 * 1024 * 4
    # A part for each rank and their sum; a rank writes to its part all but the slice it adds up.
    gradients = (size - 1 + 1) * weights
    near = {"rel": 0, "abs": 0.02 * gradients}
    assert totals["sharded"]["shared"] == pytest.approx(gradients + 3 * weights, **near)
    assert totals["replicated"]["shared"] == pytest.approx(gradients, **near)
    # Two moments: once a node in shared memory, or on every rank.
    near = {"rel": 0, "abs": 0.2 * size * weights}
    assert totals["sharded"]["own"] == pytest.approx(0, **near)
    assert totals["replicated"]["own"] == pytest.approx(2 * size * weights, **near)
