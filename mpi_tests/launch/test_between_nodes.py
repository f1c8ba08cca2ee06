"""Exchange between nodes: as one process, the same bits everywhere, and no byte too many."""

from __future__ import annotations

import json
import os

import pytest

from mpi_tests.built import OUTSIDE
from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.full import FULL
from mpi_tests.launch.commands import HPCTRAIN, ROOT

SCRIPT = """
import json, torch, hpctrain as hpc
from mpi_tests.ranks.split import Matrices, Twins, groups

def sent():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

with hpc.init(seed=1, device="cpu", num_threads=1) as world:
    engine = hpc.connect(world, "mpi", timeout_s=60).engine
    twins = Twins(world, engine, lambda m: torch.optim.AdamW(groups(m)), model=Matrices)
    twins.train()
    text = twins.replica.describe()
    twins.check()

    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    replica = hpc.distribute(world, model, optimizer, engine=engine)

    def train(steps):
        world.comm.Barrier()
        before = sent()
        for _ in range(steps):
            replica.backward(replica(torch.ones(1, 512)).mean())
            replica.step()
        world.comm.Barrier()
        return sent() - before

    train(1)
    few, many = train(2), train(8)
    rows = world.comm.allgather(((many - few) / 6, world.local_rank))
    if world.rank == 0:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        print(json.dumps({"sent": [b for b, local in rows if not local], "weights": weights,
                          "describe": text}))
    replica.close()
"""


# Unequal nodes, and more than two of them; `make test-all` adds the others.
MANY = [(2, (2, 2)), (4, (2, 1, 1, 1))] if FULL else []


@pytest.mark.parametrize(("nodes", "ranks"), [(3, (2, 1, 1)), *MANY], indirect=["nodes"])
def test_training_between_nodes_and_its_bytes(nodes, ranks, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    hosts = ",".join(f"{host}:{count}" for host, count in zip(nodes.hosts, ranks, strict=True))
    done = nodes.run(
        nodes.hosts[0],
        [*HPCTRAIN, "run", "--hosts", hosts, "--quiet", str(script)],
        timeout_s=90,
        cwd=ROOT,
        env={**nodes.environment(mpi_of_this_python().family), "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert f"{min(ranks)} slices at once" in told["describe"]
    assert "sharded by element" in told["describe"]
    expected = 2 * (len(ranks) - 1) / len(ranks) * told["weights"]
    assert len(told["sent"]) == len(ranks)
    assert told["sent"] == [pytest.approx(expected, rel=0.05)] * len(ranks)


WIRE = """
import json, sys, torch, hpctrain as hpc

def sent():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

def make(world, engine, wire):
    torch.manual_seed(3)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    return hpc.distribute(world, model, optimizer, engine=engine, wire=wire)

def train(world, replica, steps):
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(world.rank))
    world.comm.Barrier()
    before = sent()
    for _ in range(steps):
        replica.backward(replica(x).square().sum(), num_samples=4)
        replica.step()
    world.comm.Barrier()
    return sent() - before

with hpc.init(seed=1, device="cpu", num_threads=1) as world:
    engine = hpc.connect(world, sys.argv[1], timeout_s=60).engine
    found = {}
    for wire in ("none", "bf16", "fp16"):
        replica = make(world, engine, wire)
        start = torch.cat([p.detach().flatten().clone() for p in replica.model.parameters()])
        train(world, replica, 1)
        weights = torch.cat([p.detach().flatten().clone() for p in replica.model.parameters()])
        assert len(set(world.comm.allgather(weights.numpy().tobytes()))) == 1
        few, many = train(world, replica, 1), train(world, replica, 4)
        rows = world.comm.allgather(((many - few) / 3, world.local_rank))
        found[wire] = {"moved": (weights - start), "describe": replica.describe(),
                       "bytes": replica.counts()["bytes"],
                       "sent": sum(b for b, local in rows if not local)}
        replica.close()
    exact = found["none"]["moved"]
    for wire in found:
        moved = found[wire].pop("moved")
        found[wire]["error"] = float((moved - exact).abs().max() / exact.abs().max())
    if world.rank == 0:
        print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("nodes", "ranks", "engine"),
    [(2, (2, 1), "mpi"), (2, (2, 2), "torch")],
    indirect=["nodes"],
)
def test_a_wire_halves_the_bytes_between_nodes(nodes, ranks, engine, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WIRE)
    hosts = ",".join(f"{host}:{count}" for host, count in zip(nodes.hosts, ranks, strict=True))
    done = nodes.run(
        nodes.hosts[0],
        [*HPCTRAIN, "run", "--hosts", hosts, "--quiet", str(script), engine],
        timeout_s=120,
        cwd=ROOT,
        env={**nodes.environment(mpi_of_this_python().family), "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert "wire" not in told["none"]["describe"]
    # The terms and the sum are each rounded once, by half a unit of the largest.
    for wire, rounding in (("bf16", 2**-8), ("fp16", 2**-11)):
        assert f"{wire} between 2 nodes" in told[wire]["describe"]
        assert 0 < told[wire]["error"] <= 3 * rounding
        assert told[wire]["sent"] < 0.55 * told["none"]["sent"]
        assert 0.5 <= told[wire]["bytes"] / told["none"]["bytes"] < 0.501


STATE = """
import json, sys, torch, hpctrain as hpc
from contextlib import closing

def make(world, engine):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    return hpc.distribute(world, model, optimizer, engine=engine, wire="feedback")

def train(world, replica, steps):
    for step in steps:
        draw = torch.Generator().manual_seed(97 * step + world.rank)
        replica.backward(replica(torch.randn(4, 64, generator=draw)).square().sum(), num_samples=4)
        replica.step()
    return torch.cat([p.detach().flatten() for p in replica.model.parameters()]).clone()

def left(replica):
    return {key: value.clone() for key, value in replica.wire_state()[1].items()}

with hpc.init(seed=1, device="cpu", num_threads=1) as world:
    engine = hpc.connect(world, sys.argv[1], timeout_s=60).engine
    told = {}
    if sys.argv[3] == "save":
        replica = make(world, engine)
        with closing(hpc.Saver(world, sys.argv[2], replica, every_s=None, every_steps=99)) as saver:
            train(world, replica, range(3))
            at_save = left(replica)
            saver.save(wait=True)
            whole = train(world, replica, range(3, 6))
        told["num_kept"] = len(at_save)
        replica.close()
    replica = make(world, engine)
    with closing(hpc.Saver(world, sys.argv[2], replica, every_s=None, every_steps=99)) as saver:
        assert saver.restore() is not None
        loaded = left(replica)
        told["num_loaded"] = len(loaded)
        resumed = train(world, replica, range(3, 6))
        if sys.argv[3] == "save":
            same = all(torch.equal(loaded[key], at_save[key]) for key in at_save)
            told["same"] = same and torch.equal(whole, resumed)
    replica.close()
    if sys.argv[3] == "save":  # it matters: with nothing left over, the weights become others
        replica = make(world, engine)
        with closing(hpc.Saver(world, sys.argv[2], replica, every_s=None, every_steps=99)) as saver:
            saver.restore()
            replica.load_wire_state({}, {})
            told["without"] = torch.equal(whole, train(world, replica, range(3, 6)))
        replica.close()
    every = world.comm.gather(told, root=0)
    if world.rank == 0:
        print(json.dumps(every))
"""


@pytest.mark.parametrize(
    ("nodes", "engine"), [(3, "mpi"), *([(3, "torch")] if FULL else [])], indirect=["nodes"]
)
def test_the_state_of_a_wire_resumes_on_the_same_nodes_and_no_others(nodes, engine, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STATE)
    args = (engine, str(tmp_path / "run"))
    paths = os.pathsep.join([str(ROOT), str(OUTSIDE)])

    def run(hosts, what):
        done = nodes.run(
            nodes.hosts[0],
            [*HPCTRAIN, "run", "--hosts", ",".join(hosts), "--quiet", str(script), *args, what],
            timeout_s=120,
            cwd=ROOT,
            env={**nodes.environment(mpi_of_this_python().family), "PYTHONPATH": paths},
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr

    told, text = run([f"{host}:1" for host in nodes.hosts[:2]], "save")
    for one in told:
        # What went to either node, and a sum: for each message.
        assert one["num_kept"] == one["num_loaded"] >= 3
        assert one["same"]
        assert not one["without"]
    assert "is not used" not in text
    told, text = run([f"{host}:1" for host in nodes.hosts], "other")
    assert [one["num_loaded"] for one in told] == [0, 0, 0]
    assert (
        "the state of the wire feedback is not used: it is of 2 nodes, and this run has 3" in text
    )
