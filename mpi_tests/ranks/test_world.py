"""The world under a real MPI; expectations are computed from rank and size."""

from __future__ import annotations

import random
import socket

import numpy as np
import pytest
import torch
from mpi4py import MPI

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError, LaunchError
from hpctrain.world import cores
from hpctrain.world import init as join


def init(**options):
    """On the CPU, whatever the machine has: ranks of a test would share a GPU."""
    return hpc.init(**{"device": "cpu", **options})


@pytest.fixture
def world():
    with init(seed=7) as made:
        yield made


def test_place_is_mpis(world, comm):
    assert (world.rank, world.size) == (comm.Get_rank(), comm.Get_size())
    assert (world.local_size, world.num_nodes) == (world.size, 1)
    assert (world.local_rank, world.node_rank) == (world.rank, 0)
    assert world.hosts == (socket.gethostname(),)
    assert world.launch.size == world.size
    assert world.node.Get_size() == world.size
    assert world.cross.Get_size() == 1


def test_what_every_script_needs(world, comm, capfd):
    n = world.size
    assert world.is_main == (world.rank == 0)
    world.barrier()
    world.print("loss", 0.5, sep="=")
    assert capfd.readouterr().out == ("loss=0.5\n" if world.rank == 0 else "")
    mean = world.mean(world.rank)
    assert isinstance(mean, float)
    assert mean == (n - 1) / 2
    assert world.mean(np.float32(2)) == 2.0
    ranks = range(n)
    weighted = sum(r * (r + 1) for r in ranks) / sum(r + 1 for r in ranks)
    assert world.mean(world.rank, weight=world.rank + 1) == pytest.approx(weighted, rel=1e-15)
    bare = world.mean(1.0 if world.rank == 0 else float("nan"), weight=world.rank == 0)
    assert bare == 1.0  # without weight it is not looked at

    tensor = torch.tensor([world.rank, 10.0 * world.rank], dtype=torch.bfloat16, requires_grad=True)
    found = world.mean(tensor)
    assert (found.dtype, found.requires_grad) == (torch.bfloat16, False)
    assert found.tolist() == torch.tensor([(n - 1) / 2, 5.0 * (n - 1)]).bfloat16().tolist()
    whole = world.mean(torch.tensor(world.rank), weight=world.rank + 1)
    assert (whole.dtype, whole.shape) == (torch.float64, ())
    assert whole.item() == pytest.approx(weighted)
    bare = world.mean(torch.full((2,), 1.0 if world.rank == 0 else float("nan")), weight=n == 1 or
                      world.rank == 0)  # fmt: skip
    assert bare.tolist() == [1.0, 1.0]


def test_values_without_a_mean_are_refused_on_all_ranks(world):
    last = world.rank == world.size - 1
    with pytest.raises(ConfigError, match="weight=0 on every rank"):
        world.mean(1.0, weight=0)
    with pytest.raises(ConfigError, match=f"weight=-1.0 on rank {world.size - 1}"):
        world.mean(1.0, weight=-1 if last else 1)
    with pytest.raises(ConfigError, match="weight=nan"):
        world.mean(1.0, weight="much" if last else 1)
    with pytest.raises(ConfigError, match="value is dict"):
        world.mean({"loss": 1.0})
    with pytest.raises(ConfigError, match="complex"):
        world.mean(torch.ones(2, dtype=torch.complex64))
    if world.size > 1:
        with pytest.raises(ConfigError, match=r"rank 0 gave a number and rank .* shape \(2,\)"):
            world.mean(torch.ones(2) if last else 1.0)
    world.barrier()


@pytest.mark.parametrize("call", ["barrier", "mean"])
def test_a_rank_that_stays_out_is_named(world, comm, call):
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    with join(device="cpu") as some:
        if some.rank < some.size - 1:
            words = (1.0,) if call == "mean" else ()
            with pytest.raises(CollectiveError, match=f"world.{call}: .* {some.size - 1} of"):
                getattr(some, call)(*words, timeout_s=0.5)
        comm.Barrier()


def test_messages_do_not_meet_the_users(world, comm):
    assert MPI.Comm.Compare(world.comm, MPI.COMM_WORLD) == MPI.CONGRUENT


def test_global_generators_start_equal_and_then_differ(world, comm):
    equal = comm.allgather((torch.rand(3).tolist(), np.random.rand(), random.random()))
    assert all(drawn == equal[0] for drawn in equal)
    world.streams.bind_own()
    own = comm.allgather(torch.rand(3).tolist())
    assert len({tuple(drawn) for drawn in own}) == world.size


def test_a_seed_is_drawn_once_for_all(comm):
    with init() as world:
        assert len(set(comm.allgather(world.seed))) == 1


def test_threads_are_the_share_of_the_cores(world):
    core_map = cores.read_core_map()
    mask = cores.read_affinity()
    physical = {core_map.core_of.get(cpu, cpu) for cpu in mask}
    expected = world.launch.num_threads or max(1, len(physical) // world.size)
    assert world.num_threads == torch.get_num_threads() == expected


def test_threads_can_be_asked_for():
    with init(num_threads=3) as world:
        assert torch.get_num_threads() == world.num_threads == 3


def test_binding_divides_the_cores(comm):
    before = cores.read_affinity()
    try:
        with init(bind="numa") as world:
            own = comm.allgather(cores.read_affinity())
            assert own[world.rank] <= before
            if 1 < world.size <= len(before):
                assert sum(map(len, own)) == len(frozenset().union(*own)) == len(before)
    finally:
        cores.bind_process(before)


def test_describe_is_the_same_everywhere(world, comm):
    text = world.describe()
    assert set(comm.allgather(text)) == {text}
    assert f"{world.size} rank" in text
    assert len([line for line in text.splitlines() if line.strip().startswith(world.host)]) == (
        world.size
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"device": "tpu"}, "tpu"),
        ({"bind": "sockets"}, "sockets"),
        ({"preflight": "maybe"}, "maybe"),
        ({"seed": -1}, "-1"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"config": {"x": object()}}, "JSON"),
    ],
)
def test_a_wrong_argument_on_one_rank_is_refused_by_all(comm, arguments, word):
    last = comm.Get_size() - 1
    mine = arguments if comm.Get_rank() == last else {}
    with pytest.raises(ConfigError) as caught:
        init(**mine, timeout_s=30)
    assert f"rank {last} of {comm.Get_size()}" in str(caught.value)
    assert word in str(caught.value)


def test_different_configurations_are_refused_by_rank(comm):
    config = {"lr": 0.1, "rank": comm.Get_rank()}
    if comm.Get_size() == 1:
        with init(config=config) as world:
            assert world.size == 1
        return
    with pytest.raises(LaunchError, match="config digest differs") as caught:
        init(config=config)
    assert f"rank {comm.Get_size() - 1}" in str(caught.value)
    with init(config=config, preflight="off") as world:
        assert world.size == comm.Get_size()


def test_a_part_of_the_ranks_can_be_a_world(comm):
    half = comm.Split(color=comm.Get_rank() % 2, key=comm.Get_rank())
    with init(seed=1, comm=half) as world:
        assert world.size == half.Get_size()
    half.Free()


def test_device_is_the_cpu_when_asked(world):
    with init(device="cpu") as other:
        assert other.device == torch.device("cpu")
