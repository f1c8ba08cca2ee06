"""Exchange between nodes: as one process, the same bits everywhere, and no byte too many."""

from __future__ import annotations

import json

import pytest

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
