"""Batches depend on no number of ranks, and a stopped epoch goes on with every sample once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.loader import read_state, trouble_with
from hpctrain.data.partition import Batching, Seat, part_of, plan_parts
from hpctrain.data.shuffle import Order
from hpctrain.errors import ConfigError

NUM = st.integers(0, 400)
BATCH = st.integers(1, 60)
RULES = st.builds(Batching, global_batch=BATCH, drop_last=st.booleans(), even_last=st.booleans())


@given(RULES, NUM)
def test_batches_are_neighbours_and_complete(rule, num):
    cuts = list(rule.cut(0, num))
    assert len(cuts) == rule.count(num)
    assert [i for cut in cuts for i in cut] == list(range(sum(map(len, cuts))))
    assert all(0 < len(cut) <= rule.global_batch for cut in cuts)
    left = num - sum(map(len, cuts))
    assert left == (num % rule.global_batch if rule.drop_last else 0)
    short = [cut for cut in cuts if len(cut) < rule.global_batch]
    assert len(short) <= (2 if rule.even_last else 1)
    if rule.even_last and num >= rule.global_batch:
        assert all(2 * len(cut) >= rule.global_batch for cut in cuts)


@given(RULES, NUM, st.data())
def test_a_stop_moves_no_boundary(rule, num, data):
    cuts = list(rule.cut(0, num))
    done = data.draw(st.integers(0, len(cuts)))
    start = cuts[done - 1].stop if done else 0
    assert list(rule.cut(start, num)) == cuts[done:]
    assert rule.count(num - start) == len(cuts) - done


@given(RULES, NUM)
def test_enough_ahead_is_a_full_batch(rule, more):
    assert rule.next_size(rule.lookahead + more) == rule.global_batch


def test_the_last_two_batches_in_numbers():
    sizes = lambda **rule: [len(c) for c in Batching(global_batch=10, **rule).cut(0, 33)]  # noqa: E731
    assert sizes() == [10, 10, 7, 6]
    assert sizes(even_last=False) == [10, 10, 10, 3]
    assert sizes(drop_last=True) == [10, 10, 10]
    assert [len(c) for c in Batching(global_batch=10).cut(0, 35)] == [10, 10, 10, 5]


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 20), st.booleans())
def test_parts_of_a_batch(start, size, num_ranks, weighted):
    weights = [1.0 + rank for rank in range(num_ranks)] if weighted else None
    batch = range(start, start + size)
    parts = [part_of(batch, num_ranks, rank, weights) for rank in range(num_ranks)]
    assert sorted(i for part in parts for i in part) == list(batch)
    if size >= num_ranks:
        assert all(parts)
    if not weighted:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def run_until(rule, num, seed, ranks, start, num_batches):
    """What each rank takes of some batches, batch by batch; and where it stops."""
    order = Order(kind="keyed", num_samples=num, seed=seed, epoch=2)
    batches, stop = [], start
    for rank in range(ranks):
        seat = Seat(rank=rank, num_ranks=ranks)
        plan = plan_parts(rule, seat, order.at, start=start, num_samples=num)
        for number, (part, indices) in zip(range(num_batches), plan, strict=False):
            assert part.num_samples == len(indices)
            if rank == 0:
                batches.append([])
            batches[number].append(indices.tolist())
            stop = part.stop
            assert part.global_samples <= rule.global_batch
    return batches, stop


@given(st.integers(0, 300), BATCH, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_going_on_on_other_numbers_of_ranks(num, size, fleet, data):
    """As 4 -> 3 -> 2: every sample exactly once, in the batches of one process."""
    rule = Batching(global_batch=size)
    alone, _ = run_until(rule, num, 9, 1, 0, 10**6)
    seen, start = [], 0
    for ranks in fleet:
        steps = data.draw(st.integers(0, 5))
        batches, start = run_until(rule, num, 9, ranks, start, steps)
        seen += batches
    batches, start = run_until(rule, num, 9, fleet[0], start, 10**6)
    seen += batches
    assert start == num
    whole = [sorted(i for part in parts for i in part) for parts in seen]
    assert whole == [sorted(one) for [one] in alone]
    assert sorted(i for batch in whole for i in batch) == list(range(num))


@given(RULES, NUM, st.integers(1, 9), st.data())
def test_plans_are_made_of_the_parts_of_batches(rule, num, num_ranks, data):
    weights = data.draw(st.sampled_from([None, tuple(1.0 + rank for rank in range(num_ranks))]))
    start = data.draw(st.integers(0, num))
    for rank in range(num_ranks):
        seat = Seat(rank=rank, num_ranks=num_ranks, weights=weights)
        plan = list(plan_parts(rule, seat, lambda p: p, start=start, num_samples=num))
        expected = [(b, seat.part_of(b)) for b in rule.cut(start, num)]
        assert [indices.tolist() for _, indices in plan] == [list(part) for _, part in expected]
        assert [tuple(part) for part, _ in plan] == [(b.stop, len(b), len(p)) for b, p in expected]


def test_long_epochs_are_planned_in_chunks():
    rule = Batching(global_batch=6)
    order = Order(kind="numpy", num_samples=100_000, seed=1, epoch=0)
    seat = Seat(rank=1, num_ranks=2)
    plan = list(plan_parts(rule, seat, order.at, start=0, num_samples=100_000))
    assert np.array_equal(np.concatenate([i for _, i in plan]), order.between(1, 100_000, 2))


STATE = {
    "version": 1, "seed": 1, "epoch": 2, "consumed": 8, "total": 40, "order": "local",
    "num_samples": 16, "fingerprint": 5, "num_ranks": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 17}, "num_samples=16, and this loader has 17"),
        ({"order": "keyed"}, "order='local', and this loader has 'keyed'"),
        ({"fingerprint": 6}, "distributed in another order"),
        ({"num_ranks": 3}, "stopped inside an epoch on 4 ranks"),
    ],
)
def test_a_state_that_does_not_fit_says_why(change, message):
    saved = read_state(STATE)
    assert saved.to_state() == STATE
    assert trouble_with(saved, read_state(STATE | {"seed": 3, "total": 0})) is None
    assert message in trouble_with(saved, read_state(STATE | change))


def test_the_order_of_another_numpy_says_why():
    state = STATE | {"order": "numpy"}
    trouble = trouble_with(read_state(state), read_state(state | {"fingerprint": 6}))
    assert "because numpy's version is" in trouble


@pytest.mark.parametrize("order", ["weighted", "lengths"])
def test_a_plan_of_other_weights_or_lengths_is_refused_inside_an_epoch(order):
    state = STATE | {"order": order}
    other = read_state(state | {"fingerprint": 6})
    assert "is different here" in trouble_with(read_state(state), other)
    assert trouble_with(read_state(state | {"consumed": 0}), other) is None


def test_streams_that_are_split_keep_their_ranks_inside_an_epoch():
    saved = read_state(STATE | {"order": "split"})
    other = read_state(STATE | {"order": "split", "num_ranks": 3})
    assert "use 4 ranks until the epoch ends" in trouble_with(saved, other)
    assert trouble_with(read_state(STATE | {"order": "split", "consumed": 0}), other) is None


def test_a_local_shuffle_may_change_ranks_between_epochs():
    saved = read_state(STATE | {"consumed": 0})
    assert trouble_with(saved, read_state(STATE | {"num_ranks": 3})) is None


@pytest.mark.parametrize("state", [{}, {"version": 1}, STATE | {"version": 2}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ConfigError, match="not the state of a loader of version 1"):
        read_state(state)


def test_no_batch_is_refused():
    with pytest.raises(ConfigError, match="global_batch=0"):
        Batching(global_batch=0)
