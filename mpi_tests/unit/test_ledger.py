"""The first call where ranks part is found and told, with both places."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.faults import CallLog
from hpctrain.faults.calls import CallHistory, describe_site, users_site
from hpctrain.faults.diagnosis import find_divergence, render_calls

calls = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12)


def numbered(names, first=1):
    return dict(enumerate(names, first))


@given(common=calls, rank=st.integers(0, 3), at=st.integers(0, 11))
def test_one_rank_that_makes_another_call_is_found_where_it_does(common, rank, at):
    at %= len(common)
    odd = [*common[:at], "other", *common[at + 1 :]]
    recent = {r: numbered(odd if r == rank else common) for r in range(4)}
    found = find_divergence(recent)
    assert found.number == at + 1
    usual, other = found.groups
    assert (usual.name, other.name) == (common[at], "other")
    assert other.ranks == (rank,)
    assert set(usual.ranks) == set(range(4)) - {rank}


@given(common=calls, lengths=st.lists(st.integers(0, 12), min_size=2, max_size=5), old=calls)
def test_calls_not_made_yet_and_calls_forgotten_do_not_count(common, lengths, old):
    recent = {
        rank: {number: name for number, name in numbered(common).items() if number > length}
        if rank % 2
        else numbered(common[:length])
        for rank, length in enumerate(lengths)
    }
    assert find_divergence(recent) is None
    assert find_divergence({0: numbered(old), 1: numbered(common, first=len(old) + 1)}) is None


@pytest.mark.parametrize(
    ("usual", "odd", "how"),
    [
        ("abcd", "bcd", "skipped 'a'"),
        ("abc", "xabc", "a call that the others did not make"),
        ("abc", "bac", "in another order"),
        (["allreduce w float32 (3, 4)"], ["allreduce w float32 (4, 3)"], "another shape"),
        (["allreduce w float32 (3)"], ["allreduce w float64 (3)"], "another dtype"),
        (["allreduce w float32 (3)"], ["broadcast w float32 (3)"], "another call"),
        (["barrier"], ["close"], "another call"),
    ],
)
def test_in_which_way_they_differ(usual, odd, how):
    recent = {0: numbered("p" + "".join(usual)) if isinstance(usual, str) else numbered(usual)}
    recent[1] = recent[0]
    recent[2] = numbered("p" + odd) if isinstance(odd, str) else numbered(odd)
    found = find_divergence(recent)
    assert found.number == (2 if isinstance(usual, str) else 1)
    assert [group.how for group in found.groups] == ["", how]


def test_both_places_are_told():
    recent = {0: numbered("ab"), 1: numbered("ac"), 2: numbered("ab")}
    histories = {
        r: CallHistory(names=n, places=dict.fromkeys(n, f"t.py:{r}")) for r, n in recent.items()
    }
    told = render_calls(2, find_divergence(recent), histories, waiting=0, places=True)
    assert told == [
        "  the ranks' calls differ first at #2:",
        "    ranks 0,2: 'b'",
        "      at t.py:0",
        "    rank 1: 'c' (another call)",
        "      at t.py:1",
    ]


def test_equal_names_from_different_places_are_told_as_such():
    histories = {
        0: CallHistory(names=numbered("aa"), places={1: "t.py:5", 2: "t.py:7"}),
        1: CallHistory(names=numbered("a"), places={1: "t.py:6"}),
    }
    assert render_calls(2, None, histories, waiting=0, places=True) == [
        "  rank 0 waits at t.py:7",
        "  call #1 has the same name on all ranks, but was made in several places:",
        "    rank 0 at t.py:5",
        "    rank 1 at t.py:6",
    ]
    assert len(render_calls(2, None, histories, waiting=0, places=False)) == 1
    assert render_calls(2, None, {}, waiting=0, places=True) == []


def test_a_log_keeps_its_last_calls_and_where_they_were_made():
    calls = CallLog((0, 1), "world")
    for n in range(100):
        calls.enter(f"call {n}")
        calls.leave()
    history = CallHistory.read(json.loads(json.dumps(asdict(calls.history()))))
    assert history == calls.history()
    assert history.names == {n + 1: f"call {n}" for n in range(36, 100)}
    assert "test_ledger.py:" in history.places[100]
    assert history.places[100].endswith(
        "in test_a_log_keeps_its_last_calls_and_where_they_were_made"
    )


def test_a_place_is_the_line_of_the_call():
    depths = {}

    def enter():
        return users_site("x", depths)

    def deep():
        return enter()

    def deeper():
        return deep()

    for function in (deep, deep, deeper, deep):  # known by now, and not so deep again
        place = describe_site(function())
        code = function.__code__
        # The frame just above `enter` is where the log looks first.
        assert place.endswith(f" in {code.co_qualname}") or function is deeper
        assert describe_site(deep()) == (
            f"{__file__}:{deep.__code__.co_firstlineno + 1} in {deep.__code__.co_qualname}"
        )
    assert describe_site(None) == ""


def test_calls_behind_a_library_are_followed_to_the_users_line():
    source = "def first(go): return go()\ndef second(go): return first(go)\n"
    library: dict = {}
    exec(compile(source, json.__file__, "exec"), library)
    calls = CallLog((0, 1), "world")
    for through in (library["first"], library["second"], library["first"], library["second"]):
        through(lambda: calls.enter("x"))
        calls.leave()
    places = list(calls.history().places.values())
    assert len(places) == 4
    assert all(place.startswith(f"{__file__}:") for place in places)


def test_without_users_code_there_is_no_place():
    calls = CallLog((0, 1), "world")
    from threading import Thread

    worker = Thread(target=calls.enter, args=("x",))
    worker.start()
    worker.join()
    assert calls.history() == CallHistory(names={1: "x"}, places={1: ""})
