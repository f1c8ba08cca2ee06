"""Weighted draws and batches of similar lengths: plans of whole epochs, without ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.partition import Batching, Seat, plan_parts
from hpctrain.data.shuffle import LengthDraw, WeightedDraw

WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(any)
RULES = st.builds(
    Batching,
    global_batch=st.integers(1, 12),
    drop_last=st.booleans(),
    even_last=st.booleans(),
)


def drawn(draw, seed=3, epoch=0):
    return draw.plan(seed, epoch).at(np.arange(draw.num_drawn))


@given(WEIGHTS, st.integers(1, 100), st.integers(0, 2**63 - 1), st.integers(0, 50), st.data())
def test_draws_are_of_samples_with_a_weight_and_need_no_others(weights, num, seed, epoch, data):
    draw = WeightedDraw(weights, num)
    whole = drawn(draw, seed, epoch)
    assert all(weights[sample] > 0 for sample in whole)
    places = data.draw(st.lists(st.integers(0, num - 1), max_size=9))
    assert draw.plan(seed, epoch).at(np.array(places, np.int64)).tolist() == whole[places].tolist()


def test_samples_are_drawn_as_often_as_their_weights_say():
    weights = np.array([1, 0, 3, 6, 0.5, 0])
    num = 200_000
    counts = np.bincount(drawn(WeightedDraw(weights, num)), minlength=6)
    likely = weights / weights.sum()
    bound = 5 * np.sqrt(num * likely * (1 - likely))
    assert np.all(np.abs(counts - num * likely) <= bound)
    assert counts[1] == counts[5] == 0
    # Neighbours are independent: pairs come as often as their weights' products.
    chosen = drawn(WeightedDraw([1, 1, 1, 1], num))
    pairs = np.bincount(4 * chosen[:-1] + chosen[1:], minlength=16)
    assert np.all(np.abs(pairs - num / 16) <= 5 * np.sqrt(num / 16))


def test_every_epoch_and_seed_draws_anew_and_the_same_again():
    draw = WeightedDraw(np.ones(100))
    assert draw.num_drawn == 100
    base = drawn(draw)
    assert base.tolist() == drawn(WeightedDraw([7] * 100)).tolist()  # the scale says nothing
    for other in (drawn(draw, epoch=1), drawn(draw, seed=4)):
        assert base.tolist() != other.tolist()
    prints = {
        draw.plan(3, 0).fingerprint(),
        draw.plan(3, 1).fingerprint(),
        draw.plan(4, 0).fingerprint(),
        WeightedDraw(np.arange(100)).plan(3, 0).fingerprint(),
        WeightedDraw(np.ones(100), 90).plan(3, 0).fingerprint(),
    }
    assert len(prints) == 5


@given(
    st.lists(st.integers(0, 1000), max_size=150), RULES, st.integers(1, 6), st.integers(0, 2**62)
)
def test_batches_of_similar_lengths_have_every_sample_once(lengths, rule, bucket_batches, seed):
    draw = LengthDraw(np.array(lengths, np.int64), rule, bucket_batches)
    whole = drawn(draw, seed)
    assert sorted(whole.tolist()) == list(range(len(lengths)))
    cuts = list(rule.cut(0, len(lengths)))
    if not cuts:
        return
    # The batches are those of pools that were sorted: within a pool their lengths do not overlap.
    spans = sorted(
        (min(lengths[i] for i in whole[cut]), max(lengths[i] for i in whole[cut]))
        for cut in map(lambda c: slice(c.start, c.stop), cuts)
    )
    if len(cuts) <= bucket_batches:  # one pool
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


@given(st.integers(0, 120), st.integers(1, 5), st.data())
def test_length_plans_do_not_depend_on_ranks_or_stops(num, num_ranks, data):
    rule = Batching(global_batch=data.draw(st.integers(num_ranks, 12)))
    draw = LengthDraw(np.arange(num) % 7, rule, 3)
    plan = draw.plan(5, 1)
    alone = [drawn(draw, 5, 1)[cut.start : cut.stop].tolist() for cut in rule.cut(0, num)]
    stop = data.draw(st.integers(0, len(alone)))
    start = sum(map(len, alone[:stop]))
    parts = [
        [
            rows.tolist()
            for _, rows in plan_parts(
                rule, Seat(rank=rank, num_ranks=num_ranks), plan.at, start=start, num_samples=num
            )
        ]
        for rank in range(num_ranks)
    ]
    found = [sorted(sum(batch, [])) for batch in zip(*parts, strict=True)]  # noqa: RUF017
    assert found == [sorted(batch) for batch in alone[stop:]]


def test_lengths_are_alike_and_the_batches_shuffled():
    lengths = np.random.default_rng(1).integers(1, 500, 3200)
    draw = LengthDraw(lengths, Batching(global_batch=32), 20)
    batches = lengths[drawn(draw)].reshape(100, 32)
    spread = np.ptp(batches, axis=1)
    assert np.mean(spread) < 40  # of 499 where they are not sorted
    means = batches.mean(1)
    assert np.abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.35
    again = LengthDraw(lengths, Batching(global_batch=32), 20)
    assert np.array_equal(drawn(draw), drawn(again))
    assert not np.array_equal(drawn(draw), drawn(draw, epoch=1))
    prints = {
        LengthDraw(lengths, Batching(global_batch=size), pool).plan(seed, 0).fingerprint()
        for size in (32, 16)
        for pool in (20, 10)
        for seed in (1, 2)
    }
    assert len(prints) == 8


@pytest.mark.parametrize("num", [1, 31, 95])
def test_what_drop_last_leaves_out_is_not_the_longest(num):
    rule = Batching(global_batch=32, drop_last=True)
    lengths = np.arange(num)
    left = [
        set(drawn(LengthDraw(lengths, rule), 1, epoch)[num - num % 32 :].tolist())
        for epoch in range(4)
    ]
    assert all(len(rest) == num % 32 for rest in left)
    if num == 95:
        assert any(rest != left[0] for rest in left)
