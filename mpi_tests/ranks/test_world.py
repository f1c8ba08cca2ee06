"""The world under a real MPI; expectations are computed from rank and size."""

from __future__ import annotations

import random
import socket

import numpy as np
import pytest
import torch
from mpi4py import MPI

import hpctrain as hpc
from hpctrain.world import cores


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
    with pytest.raises(hpc.ConfigError) as caught:
        init(**mine, timeout_s=30)
    assert f"rank {last} of {comm.Get_size()}" in str(caught.value)
    assert word in str(caught.value)


def test_different_configurations_are_refused_by_rank(comm):
    config = {"lr": 0.1, "rank": comm.Get_rank()}
    if comm.Get_size() == 1:
        with init(config=config) as world:
            assert world.size == 1
        return
    with pytest.raises(hpc.LaunchError, match="config digest differs") as caught:
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
