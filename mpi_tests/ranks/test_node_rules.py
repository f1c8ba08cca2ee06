"""What only one rank of a node can know, and what its ranks must pass alike."""

from __future__ import annotations

import re
import resource

import pytest
import torch
from torch import optim

import hpctrain as hpc
from hpctrain.engines import create
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.world.barrier import SleepingBarrier, make_barrier
from hpctrain.world.shared_memory import allocate
from mpi_tests.ranks.split import FEATURES, Matrices, build, chunk, groups
from mpi_tests.ranks.test_engines_rules import Diary


def limit_address_space(num_bytes):
    """Leave this process so many bytes to map; the limits before."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, before[1]))
    return before


@pytest.mark.parametrize("private", [False, True])
def test_memory_that_one_rank_cannot_map_is_everyones_news(world, private):
    size = 48 << 20
    views = [(0, size)] if private else []
    # With a view of one's own it is the second mapping that fails.
    before = limit_address_space(size * (1 + private) - (16 << 20))
    if world.rank != world.size - 1:
        resource.setrlimit(resource.RLIMIT_AS, before)
    try:
        with pytest.raises(CollectiveError) as caught:
            allocate(world.comm, world.node, size, what="a test", private=views)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    text = rf"rank {world.size - 1} of {world.size}: 48.0 MiB .* could not be mapped \(Cannot alloc"
    assert re.search(text, str(caught.value))
    assert len(set(world.comm.allgather(str(caught.value)))) == 1
    block = allocate(world.comm, world.node, 4096, what="a test", private=[(0, 4096)])
    block.tensor(torch.uint8, num_elements=4096)[world.local_rank] = 7
    world.comm.Barrier()
    assert block.views[0].tensor(torch.uint8, num_elements=4096).sum() == 7 * world.local_size
    block.close()


def test_a_node_that_cannot_connect_its_ranks_is_every_nodes_news(world, monkeypatch):
    connect = SleepingBarrier._connect

    def fail_on_the_first(barrier, node):
        connect(barrier, node)
        if world.rank == 0:
            raise OSError("no sockets")

    monkeypatch.setattr(SleepingBarrier, "_connect", fail_on_the_first)
    node = world.comm.Split(world.rank == 0, world.rank)  # rank 0 is a node by itself
    with pytest.raises(CollectiveError, match=r"rank 0 of \d: local sockets do not work here"):
        make_barrier(world.comm, node, sleep=world.rank == 0)
    monkeypatch.setattr(SleepingBarrier, "_connect", connect)
    barrier = make_barrier(world.comm, node, sleep=True)
    barrier.wait()
    barrier.close()
    node.Free()


@pytest.mark.parametrize("name", ["mpi", "torch"])
def test_a_buffer_of_no_size_is_refused_before_anybody_waits(world, engines, name):
    engine = engines[name]
    if world.rank == 0:  # caught on one rank alone: the others are not left in a collective
        for wrong in (-1, 2.5, "3", None, True):
            with pytest.raises(ConfigError, match="must be a whole number, at least 0"):
                engine.allocate(wrong)
        with pytest.raises(ConfigError, match="cannot be sent; use one of float16"):
            engine.allocate(3, torch.qint8)
    assert engine.allocate(3).tolist() == [0.0] * 3


def test_buffers_are_passed_by_all_ranks_or_by_none(world, engines, monkeypatch):
    monkeypatch.setattr("hpctrain.engines.node_buffers.SMALLEST_BYTES", 1)
    engine = engines["mpi"]
    first, second = engine.allocate(1000), engine.allocate(1000)
    if world.size == 1:
        engine.allreduce_(first)
        return
    is_last = world.rank == world.size - 1
    last = world.size - 1
    for others, text in ((torch.zeros(1000), "another tensor"), (second, r"buffer \d+")):
        passed = others if is_last else first
        passed.fill_(world.rank)
        with pytest.raises(CollectiveError, match=rf"{text} on local rank {last} .*the same alloc"):
            engine.allreduce_(passed)
        assert passed.eq(world.rank).all()
    for buffer in (first, second, torch.empty(1000)):  # and on with all of them
        buffer.fill_(world.rank)
        assert engine.allreduce_(buffer).eq(sum(range(world.size))).all()


def test_every_wait_is_announced(world):
    diary = Diary()
    engine = create(world, "mpi", watch=diary)
    model = build(Matrices)
    optimizer = optim.AdamW(groups(model))
    options = {"update": "sharded", "share_parameters": True}
    replica = hpc.distribute(world, model, optimizer, engine=engine, **options)
    for step in range(2):
        replica.backward(replica(chunk(step, world.rank), step).square().mean())
        replica.step()
    if world.size > 1:
        assert "meeting of nodes" in diary.calls
        assert diary.calls.count("sharing of weights") == 1
        told = "sharing of optimizer state (first.weight, second.weight, out.weight)"
        assert diary.calls.count(told) == 1  # once: the second step has nothing new
    assert diary.depth == 0
    replica.close()
    engine.close()


def test_who_updates_what_is_told(world, engines):
    for make, names in (
        (lambda m: optim.AdamW(m.parameters()), r"first\.weight"),
        (lambda m: hpc.optim.LARS(m.parameters(), lr=0.1), r"first\.weight"),
    ):
        model = build(Matrices)
        replica = hpc.distribute(world, model, make(model), engine=engines["mpi"])
        text = replica.describe()
        replica.close()
        rows = [line for line in text.splitlines() if "local rank" in line]
        assert len(rows) == (min(world.local_size, 4) if world.size > 1 else 0), text
        if rows:
            assert re.search(names, "".join(rows)), text
            assert len(set(world.comm.allgather(text))) == 1


class Complex(torch.nn.Module):
    """One complex parameter, whose piece one rank owns."""

    def __init__(self) -> None:
        super().__init__()
        self.real = torch.nn.Linear(FEATURES, FEATURES)
        self.phase = torch.nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x):
        return self.real(x.float()).mean() + (self.phase.abs() ** 2).sum()


def test_a_fused_optimizer_refuses_complex_weights_on_all_ranks(world, engines):
    torch.manual_seed(0)
    model = Complex()
    optimizer = optim.Adam([{"params": [model.phase]}, {"params": model.real.parameters()}])
    for group in optimizer.param_groups:
        group["fused"] = True
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    replica.backward(replica(chunk(0, world.rank)))
    before = model.real.weight.clone()
    if world.size == 1:
        with pytest.raises(RuntimeError, match="fused"):  # torch's own
            replica.step()
    else:
        with pytest.raises(ConfigError, match=r"phase is complex, and torch's fused Adam .*fused="):
            replica.step()
        assert torch.equal(model.real.weight, before)
    optimizer.param_groups[0]["fused"] = False
    replica.zero_grad()
    replica.backward(replica(chunk(0, world.rank)))
    assert replica.step()
    replica.close()
