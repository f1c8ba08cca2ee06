"""The watchdog's verdicts and notes, without MPI."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
import timeit
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.faults import CallLog
from hpctrain.faults.calls import Call, CallState, format_stacks, users_place
from hpctrain.faults.channel import Peer, Responder, ask_all
from hpctrain.faults.diagnosis import (
    MissingKind,
    NoReply,
    Reply,
    diagnose,
    render_report,
    summarize,
)
from hpctrain.faults.peers import choose_address
from hpctrain.world import END_OF_BLOCK, Watching

NAMES = [f"allreduce bucket {n}" for n in range(40)]


def inside(number, seconds=9.0, *, names=NAMES, outer=(), num_threads=1, **more):
    """A rank in call `number` (and in `outer` ones around it)."""
    calls = [Call(number=n, name=names[n], seconds=s) for n, s in (*outer, (number, seconds))]
    return Reply(
        state=CallState(
            entered=number,
            open=tuple(calls),
            innermost=(number,),
            recent={n: names[n] for n in range(1, number + 1)},
            num_threads=num_threads,
        ),
        patience_s=0.0,
        **more,
    )


def outside(last, seconds=9.0, **more):
    """A rank that is in no call after call `last`."""
    ended = Call(number=last, name=NAMES[last], seconds=seconds) if last else None
    recent = {n: NAMES[n] for n in range(1, last + 1)}
    state = CallState(entered=last, ended=ended, recent=recent)
    return Reply(state=state, patience_s=0.0, **more)


def test_a_rank_at_the_end_of_the_block_has_left_the_loop():
    at_end = f"'{END_OF_BLOCK}: allgather' #20 of world for 6.0 s"
    found = diagnose({0: inside(5), 1: outside(4, elsewhere=(at_end,))})
    (missing,) = found.missing
    assert missing.doing == (
        "has left the training loop and is at the end of `with hpc.init()`, after 4 calls"
    )


def test_calls_go_by_what_the_user_has_called():
    watching, calls = Watching(), CallLog((0,), "world")
    watching.watches["comm"] = calls
    with watching.called(END_OF_BLOCK), watching.announce("allgather"):
        (call,) = calls.state().open
    assert call.name == "the end of `with hpc.init()`: allgather"
    with watching.announce("allgather"):
        (call,) = calls.state().open
    assert call.name == "allgather"


def test_a_rank_that_has_closed_its_connection_is_not_said_to_have_made_no_call():
    closed = Reply(state=CallState(entered=4), patience_s=0.0)
    (missing,) = diagnose({0: inside(5), 1: closed}).missing
    assert missing.doing == "has closed this connection, after 4 calls"


def renamed(number, name):
    return [*NAMES[:number], name, *NAMES[number + 1 :]]


def kinds(diagnosis):
    return {one.rank: one.kind for one in diagnosis.missing}


@given(
    number=st.integers(1, 30),
    ranks=st.lists(st.sampled_from(["in", "out", "dead", "ahead"]), min_size=1, max_size=20),
)
def test_each_rank_is_waiting_missing_or_ahead(number, ranks):
    ranks = ["in", *ranks]
    made = {
        "in": inside(number),
        "out": outside(number - 1),
        "dead": NoReply(reason="gone"),
        "ahead": outside(number),
    }
    diagnosis = diagnose({rank: made[kind] for rank, kind in enumerate(ranks)})
    where = {kind: [r for r, k in enumerate(ranks) if k == kind] for kind in made}
    assert (diagnosis.number, diagnosis.name) == (number, NAMES[number])
    assert list(diagnosis.waiting) == where["in"]
    assert list(diagnosis.ahead) == where["ahead"]
    assert kinds(diagnosis) == {
        **dict.fromkeys(where["out"], MissingKind.OUTSIDE),
        **dict.fromkeys(where["dead"], MissingKind.SILENT),
    }


def test_nobody_in_a_call_is_no_verdict():
    assert diagnose({0: outside(3), 1: NoReply(reason="gone")}) is None


def test_all_there_is_nobodys_fault():
    diagnosis = diagnose({0: inside(3, 9.0), 1: inside(3, 4.0)})
    assert (diagnosis.missing, diagnosis.seconds, diagnosis.complete_s) == ((), 9.0, 4.0)
    assert "no rank is missing" in summarize(diagnosis, timeout_s=5)


def test_another_call_at_the_same_number_is_named():
    other = renamed(17, "broadcast weights")
    answers = {0: inside(17), 1: inside(17), 2: inside(17, names=other), 3: inside(17)}
    diagnosis = diagnose(answers)
    assert kinds(diagnosis) == {2: MissingKind.OTHER}
    text = render_report(
        diagnosis,
        timeout_s=5,
        hosts=dict.fromkeys(range(4), "node"),
        stacks={},
        speaker=(0, diagnosis.call),
        code=124,
    )
    assert (
        "rank 2 on node is in 'broadcast weights' #17 for 9.0 s, while ranks 0-1,3 are in "
        "'allreduce bucket 17' #17" in text
    )


@pytest.mark.parametrize(
    ("name", "answer", "told"),
    [
        ("allreduce bucket 4 (fc.weight)", outside(3), True),
        ("allreduce weights and use of gradients", outside(3), True),
        ("allreduce bucket 4 (fc.weight)", inside(4, names=renamed(4, "close")), True),
        ("allreduce bucket 4 (fc.weight)", NoReply(reason="cannot be reached (refused)"), True),
        ("barrier", outside(3), False),
        ("allreduce bucket 4 (fc.weight)", inside(2), False),
        ("allreduce bucket 4 (fc.weight)", NoReply(reason="gone"), False),
    ],
)
def test_join_is_suggested_where_a_rank_may_have_left_the_training_loop(name, answer, told):
    there = inside(4, names=renamed(4, name))
    diagnosis = diagnose({0: there, 1: there, 2: answer}, long_s=5.0 if told else 0.0)
    number = diagnosis.number
    text = render_report(
        diagnosis,
        timeout_s=5.0,
        hosts=dict.fromkeys(range(3), "here"),
        stacks={},
        speaker=(0, Call(number=number, name=diagnosis.name, seconds=9.0)),
        code=124,
    )
    assert ("if rank 2 had no data left" in text) == told
    assert ("`with replica.join():`" in text) == told


def test_a_rank_that_made_another_call_and_went_on_is_named():
    names = renamed(17, "broadcast weights")
    diagnosis = diagnose({0: inside(17), 1: inside(17), 2: inside(18, names=names)})
    assert kinds(diagnosis) == {2: MissingKind.OTHER}
    assert diagnosis.missing[0].doing.startswith("made 'broadcast weights' as #17 and is in")


def test_the_earliest_call_that_holds_up_the_others_is_reported():
    diagnosis = diagnose({0: inside(17), 1: inside(15), 2: outside(14), 3: inside(17)})
    assert diagnosis.number == 15
    assert diagnosis.waiting == (1,)
    assert kinds(diagnosis) == {2: MissingKind.OUTSIDE}
    assert diagnosis.ahead == (0, 3)


def test_a_slow_rank_on_its_way_is_not_mistaken_for_one_that_waits():
    diagnosis = diagnose({0: inside(17), 1: inside(15, 0.1), 2: outside(14)}, long_s=2.5)
    assert diagnosis.number == 17
    assert kinds(diagnosis) == {1: MissingKind.EARLIER, 2: MissingKind.OUTSIDE}


def test_nested_calls_blame_the_rank_that_is_not_in_the_inner_one():
    deep = inside(8, 8.0, outer=[(7, 9.0)])
    diagnosis = diagnose({0: deep, 1: deep, 2: inside(7)})
    assert diagnosis.number == 8
    assert kinds(diagnosis) == {2: MissingKind.EARLIER}


def test_threads_that_entered_in_another_order_are_not_blamed():
    def both(names):
        calls = tuple(Call(number=n, name=names[n], seconds=9.0) for n in (5, 6))
        state = CallState(
            entered=6, open=calls, innermost=(5, 6), recent=dict(enumerate(names)), num_threads=2
        )
        return Reply(state=state, patience_s=0.0)

    swapped = [*NAMES[:5], NAMES[6], NAMES[5]]
    diagnosis = diagnose({0: both(NAMES[:7]), 1: both(swapped), 2: outside(4)})
    assert (diagnosis.waiting, kinds(diagnosis)) == ((0, 1), {2: MissingKind.OUTSIDE})
    assert diagnose({0: both(NAMES[:7]), 1: both(swapped)}).missing == ()


@given(answer=st.sampled_from([inside(3, outer=[(2, 9.5)]), outside(4), outside(0)]))
def test_answers_survive_the_channel(answer):
    assert Reply.read(json.loads(json.dumps(asdict(answer)))) == answer


def test_a_lane_notes_calls_of_all_threads():
    calls = CallLog((0, 1), "world")
    go, done = threading.Event(), threading.Event()

    def work():
        calls.enter("in the worker")
        go.set()
        done.wait(10)
        calls.leave()

    calls.enter("first")
    calls.leave()
    worker = threading.Thread(target=work)
    worker.start()
    go.wait(10)
    calls.enter("outer")
    calls.enter("inner")
    state = calls.state()
    assert sorted((c.number, c.name) for c in state.open) == [
        (2, "in the worker"),
        (3, "outer"),
        (4, "inner"),
    ]
    assert sorted(state.innermost) == [2, 4]
    assert (state.entered, state.ended.name, state.num_threads) == (4, "first", 2)
    calls.leave()
    calls.leave()
    done.set()
    worker.join()
    assert calls.state().open == ()
    with pytest.raises(RuntimeError, match=r"leave\(\) without enter\(\)"):
        calls.leave()


def test_a_call_moves_while_those_inside_it_do():
    calls = CallLog((0, 1), "world")
    calls.enter("all chunks")
    since = calls._stacks[threading.get_ident()][0][2]
    calls.enter("chunk")
    calls.leave()
    ended = calls._ended[1]
    (call,) = calls.pending(since + 100.0)
    assert call.name == "all chunks"
    assert call.seconds == pytest.approx(100.0 - (ended - since))


def test_a_thread_that_died_in_a_call_is_forgotten():
    calls = CallLog((0, 1), "world")
    worker = threading.Thread(target=calls.enter, args=("never left",))
    worker.start()
    worker.join()
    assert calls.state().open == ()


GARBAGE = """
import gc, sys, threading, time
from hpctrain.faults.calls import CallLog, format_stacks, users_place

class Cycle:
    def __init__(self):
        self.own, self.local = self, threading.local()
        self.local.value = [self]

    def __del__(self):
        sum(range(50))

def watch():
    while True:
        calls.pending(time.monotonic())
        users_place()
        format_stacks()
        Cycle()

calls = CallLog((0, 1), "world")
calls.enter("barrier")
gc.set_threshold(10)
sys.setswitchinterval(1e-5)
for _ in range(4):
    threading.Thread(target=watch, daemon=True).start()
end = time.monotonic() + 1.5
while time.monotonic() < end:
    Cycle()
    time.sleep(0)
print("alive", gc.isenabled(), flush=True)
"""


def test_collecting_garbage_while_the_watchdog_looks_stops_nobody():
    # Python 3.11 can wait for itself in sys._current_frames while it collects garbage.
    done = subprocess.run(
        [sys.executable, "-c", GARBAGE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "alive True\n", done.stderr


def test_a_long_history_keeps_the_last_calls():
    calls = CallLog((0, 1), "world")
    for n in range(1000):
        calls.enter(f"call {n}")
        calls.leave()
    state = calls.state()
    assert state.entered == 1000
    assert state.recent == {n: f"call {n - 1}" for n in range(937, 1001)}


def test_noting_a_call_and_its_place_costs_a_microsecond_or_two():
    # CPU time: beside two busy processes on two cores wall time doubles, and this does not move.
    calls = CallLog((0, 1), "world")
    repeats = timeit.repeat(
        "calls.enter('x'); calls.leave()",
        globals={"calls": calls},
        timer=time.thread_time,
        number=20_000,
        repeat=9,
    )
    assert statistics.median(repeats) / 20_000 < 2.5e-6


def test_many_ranks_are_asked_at_once_and_the_dead_ones_are_told():
    responder = Responder(
        lambda question: {"heard": question["ask"], "x": "y" * 100_000}, remote=False
    )
    live = Peer(address="127.0.0.1", port=responder.port, token=responder.token, pid=1, birth="")
    wrong = Peer(address="127.0.0.1", port=responder.port, token="no", pid=1, birth="")
    peers = {**dict.fromkeys(range(300), live), 300: wrong}
    answers = ask_all(peers, {"ask": "hello"}, timeout_s=30)
    assert [answers[rank]["heard"] for rank in range(300)] == ["hello"] * 300
    assert answers[300] == "closed the connection without a reply"
    responder.close()
    answers = ask_all({0: live}, {"ask": "hello"}, timeout_s=5)
    assert answers[0].startswith("cannot be reached (Connection refused")


def test_a_rank_that_accepts_and_says_nothing_is_given_up():
    hold = threading.Event()
    responder = Responder(lambda _: {"held": hold.wait(10)}, remote=False)
    peer = Peer(address="127.0.0.1", port=responder.port, token=responder.token, pid=1, birth="")
    assert ask_all({3: peer}, {"ask": "hello"}, timeout_s=0.2) == {3: "no reply within 0.2 s"}
    hold.set()
    responder.close()


@pytest.mark.parametrize(
    ("resolved", "theirs", "mine", "expected"),
    [
        (["10.0.0.2"], ["10.0.0.2/24"], ["10.0.0.1/24"], "10.0.0.2"),
        (["127.0.1.1"], ["172.17.0.1/16", "10.0.0.2/24"], ["10.0.0.1/24"], "10.0.0.2"),
        ([], ["172.17.0.1/16", "10.1.0.2/24"], ["172.17.0.1/16", "10.2.0.1/24"], "10.1.0.2"),
        ([], ["172.17.0.1/16"], ["172.17.0.1/16"], ""),
    ],
)
def test_the_address_of_another_node(resolved, theirs, mine, expected):
    assert choose_address(resolved, theirs, mine) == expected


def test_stacks_show_the_users_lines():
    assert "test_watchdog.py" in users_place()
    assert "in test_stacks_show_the_users_lines" in users_place()
    stop = threading.Event()
    worker = threading.Thread(target=stop.wait, name="a worker")
    worker.start()
    text = format_stacks()
    stop.set()
    worker.join()
    assert text.startswith("MainThread, most recent call last:")
    assert "a worker, most recent call last:" in text
    assert "text = format_stacks()" in text
