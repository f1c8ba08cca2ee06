"""Slow and drifting ranks are named by what their own work costs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.faults.stragglers import Stragglers, Tally, Work


def works(times, *, error=0.001, num_steps=100_000):
    """Of ranks whose steps took so long, give or take a part of it."""
    return [Work(mean_s=t, error_s=error * t, num_steps=num_steps) for t in times]


@given(size=st.integers(3, 16), base=st.floats(1e-3, 10), data=st.data(), factor=st.floats(1.3, 20))
def test_one_slow_rank_is_found(size, base, data, factor):
    rank = data.draw(st.integers(0, size - 1))
    jitter = data.draw(st.lists(st.floats(1.0, 1.05), min_size=size, max_size=size))
    times = [base * own for own in jitter]
    times[rank] *= factor
    found = Stragglers([f"n{r}" for r in range(size)]).compare(works(times), step=5)
    assert (found.slowest, found.slow, found.drifting) == (rank, (rank,), ())
    assert found.is_news
    assert f"rank {rank} on n{rank} works longest" in found.text


@given(st.lists(st.floats(1.0, 1.19), min_size=1, max_size=9))
def test_equal_ranks_are_no_news(times):
    assert not Stragglers(["n"] * len(times)).compare(works(times), step=1).is_news


def test_ranks_that_lose_ground_are_named_with_the_step():
    judge = Stragglers(["a", "a", "b", "b"])
    assert not judge.compare(works([1, 1, 1, 1.1]), step=100).is_news
    found = judge.compare(works([2, 2, 2.4, 3.0]), step=200)
    assert (found.slow, found.drifting) == ((3, 2), (3, 2))
    assert found.text == (
        "rank 3 on b works longest: 3 s a step, 1.50 of the median (2 s); also slow: rank 2 on b "
        "(1.20); slower against the median since step 100: rank 3 on b from 1.10 to 1.50, rank 2 "
        "on b from 1.00 to 1.20"
    )


def test_ranks_of_a_slow_node_are_told_together():
    found = Stragglers(["a"] * 5 + ["b"] * 4).compare(works([1] * 5 + [3, 2, 2, 2]), step=1)
    assert "also slow: ranks 6-8 on b (2.00)" in found.text


def test_two_ranks_and_no_work_at_all():
    judge = Stragglers(["a", "b"])
    found = judge.compare(works([1.0, 2.0]), step=1)
    assert (found.slowest, found.slow) == (1, (1,))
    assert not judge.compare(works([0.0, 0.0]), step=2).is_news
    with pytest.raises(ConfigError, match="3 times for 2 ranks"):
        judge.compare(works([1, 2, 3]), step=3)
    with pytest.raises(ConfigError, match="must be more than 1"):
        Stragglers(["a"], slow=1)


def test_a_tally_leaves_waiting_out():
    tally = Tally()
    assert tally.passed(10.0, 5.0) is None
    assert tally.passed(11.0, 5.25) == 0.75
    assert tally.passed(12.0, 5.75) == 0.5
    assert tally.take() == Work(mean_s=0.625, error_s=0.125, num_steps=2)
    assert tally.take() == Work(mean_s=0.0, error_s=math.inf, num_steps=0)


def test_chance_and_trifles_are_no_news():
    judge = Stragglers(["a", "b"])
    found = judge.compare(works([4e-3, 5.88e-3], error=0.1), step=50)
    assert (found.slow, found.is_news) == ((), False)  # as like as not the other one next time
    assert Stragglers(["a", "b"]).compare(works([1, 3], error=math.inf), step=1).slow == ()
    found = judge.compare(works([4e-3, 5.88e-3], num_steps=400), step=450)
    assert (found.slow, found.is_news) == ((1,), False)  # so it is, and who cares for 0.75 s
    assert judge.compare(works([4e-3, 5.88e-3], num_steps=400), step=850).is_news
    judge.compare(works([4e-3, 4e-3]), step=900)
    assert not judge.compare(works([4e-3, 5.88e-3], num_steps=400), step=950).is_news


def test_a_comparison_of_few_steps_is_nothing_to_drift_from():
    judge = Stragglers(["a", "b"])
    judge.compare(works([0, 0], num_steps=0), step=0)
    found = judge.compare(works([1, 1.18]), step=100)
    assert (found.slow, found.drifting) == ((), ())
    assert judge.compare(works([1, 1.4]), step=200).drifting == (1,)
