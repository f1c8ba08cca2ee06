"""The watchdog where nothing hangs: it keeps quiet, answers, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

import hpctrain as hpc
from hpctrain import faults
from hpctrain.errors import ConfigError
from hpctrain.faults.calls import THREAD_PREFIX
from hpctrain.faults.diagnosis import MissingKind, Reply, diagnose


@pytest.fixture
def world():
    with hpc.init(seed=7) as made:
        yield made


@pytest.fixture
def make(world):
    """Collective: a watchdog that is stopped after the test."""
    made = []

    def start(timeout_s):
        made.append(faults.start(world, timeout_s=timeout_s))
        return made[-1]

    yield start
    world.comm.Barrier()
    for dog in made:
        dog.stop()


def own_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith(THREAD_PREFIX)]


def test_a_world_has_one_set_of_threads_and_leaves_none():
    before = own_threads()
    with hpc.init(seed=7) as world:
        # One looks, one answers, and one listens for a death where `hpctrain run` does not.
        wanted = 0 if world.size == 1 else 2 + (world.launch.control_fd is None)
        assert len(own_threads()) - len(before) == wanted
        dog = faults.start(world, timeout_s=60)
        dog.enter("barrier")
        world.comm.Barrier()
        dog.leave()
        assert len(own_threads()) - len(before) == wanted
        dog.stop()
        dog.stop()
        world.comm.Barrier()
        assert len(own_threads()) - len(before) == wanted
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert own_threads() == before


def test_every_wait_of_the_worlds_communicators_is_announced(world):
    if world.size == 1:
        return
    calls = world.watching.watchdog
    world.comm.allgather(world.rank)
    hpc.agree(world.comm, None)
    world.node.bcast(None, root=0)
    hpc.metrics.total(world, 1.0)
    names = list(calls.history().names.values())
    assert names[:2] == ["allgather", "agree"]
    assert names[-2:] == ["total: agree", "total: allgather"]
    assert "bcast" in world.watching.watches["node"].history().names.values()
    # Who duplicates a communicator announces its calls himself.
    own = world.comm.Dup()
    own.Barrier()
    own.Free()
    assert list(calls.history().names.values())[-1] == "Dup"


def test_wrong_timeouts_are_refused_on_all_ranks(world):
    last = world.rank == world.size - 1
    before = own_threads()
    with pytest.raises(ConfigError, match="timeout_s=0 must be more than 0"):
        faults.start(world, timeout_s=0 if last else 5)
    if world.size > 1:
        with pytest.raises(ConfigError, match="must be equal on all ranks"):
            faults.start(world, timeout_s=6 if last else 5)
    assert own_threads() == before


def test_every_rank_can_say_who_is_missing(world, make):
    dog = make(60)
    absent = world.size - 1
    dog.enter("allreduce bucket 0")
    dog.leave()
    if world.rank != absent or world.size == 1:
        dog.enter("allreduce bucket 1")
    world.comm.Barrier()
    if world.size > 1:
        answers = dog.monitor.ask_ranks(dog)
        assert sorted(answers) == list(range(world.size))
        assert all(isinstance(answer, Reply) for answer in answers.values())
        diagnosis = diagnose(answers)
        assert (diagnosis.number, diagnosis.name) == (2, "allreduce bucket 1")
        assert diagnosis.waiting == tuple(range(absent))
        assert [(one.rank, one.kind) for one in diagnosis.missing] == [
            (absent, MissingKind.OUTSIDE)
        ]
        assert "test_watchdog.py" in diagnosis.missing[0].place
    world.comm.Barrier()


def test_every_rank_can_say_where_the_calls_differ(world, make):
    dog = make(60)
    odd = world.size - 1
    dog.enter("broadcast w float32 (3)")
    dog.leave()
    if world.rank == odd:
        dog.enter("allreduce w float32 (4, 3)")
    else:
        dog.enter("allreduce w float32 (3, 4)")
    world.comm.Barrier()
    if world.size > 1:
        answers = dog.monitor.ask_ranks(dog)
        lines = dog.monitor.survey.compare(dog, diagnose(answers), answers, [odd, 0])
        assert lines[0] == "  the ranks' calls differ first at #2:"
        assert "'allreduce w float32 (3, 4)'" in lines[1]
        assert f"    rank {odd}: 'allreduce w float32 (4, 3)' (another shape)" in lines
        places = {line for line in lines if line.startswith("      at ")}
        assert len(places) == 2
        assert all("test_watchdog.py:" in place for place in places)
    world.comm.Barrier()


def test_a_stranger_gets_no_answer(world, make):
    dog = make(60)
    if world.size > 1:
        peer = dog.monitor.peers[(world.rank + 1) % world.size]
        assert peer.address == "127.0.0.1"
        for line in (b'{"ask": "stacks"}\n', b"GET / HTTP/1.0\n", b'{"token": "x"}\n', b"x" * 5000):
            with socket.create_connection((peer.address, peer.port), timeout=10) as sock:
                sock.sendall(line)
                try:
                    assert sock.recv(100) == b""
                except ConnectionResetError:
                    continue
        with socket.create_connection((peer.address, peer.port), timeout=10) as sock:
            sock.sendall(json.dumps({"ask": "hello", "token": peer.token}).encode() + b"\n")
            assert json.loads(sock.makefile().readline()) == {"rank": (world.rank + 1) % world.size}


def test_patience_of_the_awaited_rank_holds_for_those_who_wait(world, make):
    dog = make(0.5)
    if world.rank == 0:
        with dog.patience(30):
            time.sleep(1.2)
        assert world.size == 1 or dog.monitor.patience_s == 30
        time.sleep(0.3)
    dog.enter("barrier")
    world.comm.Barrier()
    dog.leave()
    time.sleep(0.6)
    assert world.size == 1 or dog.monitor.patience_s == 0
    with pytest.raises(ConfigError, match="must be more than 0"), dog.patience(0):
        pass


def test_while_nobody_is_missing_time_counts_from_the_last_arrival(world, make):
    dog = make(2.0)
    if world.rank == world.size - 1:
        time.sleep(1.2)
    dog.enter("a long exchange")
    time.sleep(2.5 if world.rank != world.size - 1 else 1.3)
    dog.leave()


def test_a_call_log_has_numbers_of_its_own(world, make):
    dog = make(60)
    calls = dog.among(range(world.size))
    again = dog.among(range(world.size))
    assert calls.key != again.key
    dog.enter("outer")
    calls.enter("inner")
    world.comm.Barrier()
    if world.size > 1:
        diagnosis = diagnose(dog.monitor.ask_ranks(calls))
        assert (diagnosis.number, diagnosis.name, diagnosis.missing) == (1, "inner", ())
        told = dog.monitor.ask_ranks(again)[(world.rank + 1) % world.size]
        names = {text.partition("' #")[0] for text in told.elsewhere}
        assert {"'outer", "'inner"} <= names
    world.comm.Barrier()
    calls.leave()
    dog.leave()
    with pytest.raises(ConfigError, match="does not contain this rank"):
        dog.among([world.rank + 1])
