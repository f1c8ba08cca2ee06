"""At the step boundary all ranks learn the same thing at the same step."""

from __future__ import annotations

import os
import signal
import time

import pytest

from hpctrain import faults
from hpctrain.errors import ConfigError
from hpctrain.faults.boundary import Agreed, Boundary, BoundaryMessage
from hpctrain.faults.preemption import Preemption


@pytest.fixture
def boundary(world):
    made = Boundary(world, timeout_s=60)
    yield made
    made.close()


def test_what_one_rank_says_is_known_to_all_one_step_later(world, boundary):
    last = world.size - 1
    assert boundary.meet() == Agreed()
    for step in range(5):
        mine = step == 2 and world.rank == last
        agreed = boundary.meet(BoundaryMessage(stop=mine, signal="SIGUSR2" if mine else None))
        told = (agreed.stop, agreed.signal_by, agreed.signal)
        if step == 3:
            assert [told[0].rank, told[1].rank, told[2]] == [last, last, "SIGUSR2"]
        else:
            assert told == (None, None, None)
            assert agreed == Agreed()


def test_at_once_nothing_is_lost_and_nothing_is_told_twice(world, boundary):
    first = world.rank == 0
    boundary.meet(BoundaryMessage(save=True))
    agreed = boundary.meet(BoundaryMessage(failure=first, left_s=50.0 + world.rank), now=True)
    assert agreed.save.rank == agreed.failure.rank == 0
    assert agreed.left_s == 50.0
    assert boundary.meet() == Agreed()
    assert boundary.meet(now=True) == Agreed()


def test_the_text_of_the_rank_that_spoke_is_heard_by_all(world, boundary):
    agreed = boundary.meet(BoundaryMessage(failure=world.rank >= world.size // 2), now=True)
    said = boundary.broadcast(agreed.failure, f"disk full on rank {world.rank}")
    assert said == f"disk full on rank {world.size // 2}"


def test_a_signal_to_one_rank_stops_all_at_the_same_step(world, boundary):
    last = world.rank == world.size - 1
    with Preemption() as asked:
        for step in range(100):
            if step == 10 and last:
                os.kill(os.getpid(), signal.SIGUSR2)
            agreed = boundary.meet(BoundaryMessage(signal=asked.requested))
            if agreed.signal is not None:
                break
        assert world.comm.allgather(step) == [11] * world.size
        assert (agreed.signal, agreed.signal_by.rank) == ("SIGUSR2", world.size - 1)


def test_the_rank_that_works_longest_is_named_not_those_who_wait_for_it(world, boundary):
    last = world.size - 1
    for _ in range(8):
        time.sleep(0.06 if world.rank == last else 0.01)
        boundary.meet(now=True)
    found = boundary.compare_ranks(step=8)
    assert found.slowest == last
    assert 0.06 <= found.slowest_s < 0.6
    assert f"rank {last} on {world.ranks[last].host} works longest" in found.text
    if world.size > 1:
        assert found.slow[0] == last
        assert world.comm.allgather(found) == [found] * world.size


def test_it_is_a_call_of_the_watchdog(world):
    dog = faults.start(world, timeout_s=60)
    boundary = Boundary(world, timeout_s=60, watchdog=dog)
    for _ in range(3):
        boundary.meet()
    if world.size > 1:
        ended = boundary._watch.state().ended
        assert (ended.number, ended.name) == (3, "the step boundary")
    boundary.close()
    boundary.close()
    with pytest.raises(ConfigError, match="this step boundary is closed"):
        boundary.meet()
    with pytest.raises(ConfigError, match="timeout_s=0 must be more than 0"):
        Boundary(world, timeout_s=0)
    world.comm.Barrier()
    dog.stop()
