"""When to save and when to stop, on a clock that the tests turn."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.faults.governor import Governor, Pace, daly_interval_s, quantile
from hpctrain.log import format_seconds

positive = st.floats(0.01, 1e4)


@given(cost=st.floats(0.1, 1e3), mtbf=st.floats(1e3, 1e6))
def test_dalys_interval_loses_less_than_its_neighbours(cost, mtbf):
    def time_per_work(interval):
        # Daly's model: total time per unit of work, restart costs left out.
        return mtbf * (math.exp((interval + cost) / mtbf) - 1) / interval

    best = daly_interval_s(cost, mtbf)
    if cost < mtbf / 2:
        assert best > 0
        for factor in (0.5, 2.0):
            assert time_per_work(best) <= time_per_work(best * factor) * (1 + 1e-9)
    assert best == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.6) or cost > mtbf / 100


def test_dalys_interval_where_saving_costs_more_than_failing():
    assert daly_interval_s(300, 100) == 100
    assert daly_interval_s(8, 86400) == pytest.approx(1171.4, abs=1)


@given(st.lists(positive, min_size=1), st.floats(0.01, 1))
def test_quantiles(values, share):
    found = quantile(sorted(values), share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values)


@settings(max_examples=40)
@example(step_s=2.0, save_s=86.0, walltime_s=4337.0, jitter=[1.0], slow_save=1.0)
@given(
    step_s=st.floats(2, 20),
    save_s=st.floats(0.1, 100),
    walltime_s=st.floats(600, 5000),
    jitter=st.lists(st.floats(0.5, 1.0), min_size=1, max_size=40),
    slow_save=st.floats(1.0, 1.5),
)
def test_a_run_saves_in_time_and_stops_at_the_last_safe_step(
    step_s, save_s, walltime_s, jitter, slow_save
):
    governor = Governor(Pace(lead_s=20))
    assert not governor.must_stop(walltime_s)
    clock, made, last_begin, gaps = 0.0, 0, 0.0, []
    while True:
        took = step_s * jitter[made % len(jitter)]
        clock += took
        made += 1
        governor.step_took(took)
        save_due = governor.save_is_due(clock)
        if governor.must_stop(walltime_s - clock, save_due=save_due):
            break
        if save_due:
            gaps.append((clock - last_begin, governor.interval_s))
            last_begin = clock
            governor.saved(clock)
            governor.save_took(save_s)
            clock += save_s
    # One more step until all ranks know, then a save slower than any before.
    worst = max(save_s * slow_save if governor._saves else governor.save_s, 0.0)
    assert clock + step_s + worst <= walltime_s or not governor._saves
    # The step before would have been too early by no more than what the reserve allows for.
    assert walltime_s - clock <= governor.reserve_s + 4 * step_s + save_s
    for gap, interval in gaps[1:]:
        assert abs(gap - interval) <= step_s + save_s + 1e-6


def test_slow_saves_are_learned_and_forgotten():
    governor = Governor(Pace(lead_s=30, margin=2))
    assert governor.reserve_s == 30 + 2 * 60
    governor.save_took(10)
    assert governor.reserve_s == 30 + 2 * 10
    governor.save_took(50)
    assert governor.reserve_s == 30 + 2 * 50
    for _ in range(16):
        governor.save_took(10)
    assert governor.reserve_s == 30 + 2 * 10


def test_saving_in_the_background_costs_only_what_it_blocks():
    blocking, background = Governor(), Governor()
    for _ in range(3):
        blocking.save_took(100)
        background.save_took(100, blocked_s=1)
    assert background.reserve_s == blocking.reserve_s
    assert 100 <= background.interval_s < blocking.interval_s / 5


def test_a_stated_interval_is_kept_and_no_limit_never_stops():
    governor = Governor(Pace(every_s=100), now_s=50)
    governor.step_took(10)
    assert not governor.save_is_due(140)
    assert governor.save_is_due(145)
    governor.saved(145)
    assert not governor.save_is_due(150)
    assert not governor.must_stop(None)


def test_a_short_job_makes_progress():
    governor = Governor()
    assert not governor.must_stop(120)
    assert not governor.must_stop(1)  # before its first step
    governor.step_took(1)
    assert not governor.must_stop(110)
    assert governor.must_stop(30)
    assert governor.reserve_s == pytest.approx(12 + 1.5 * 12)


def test_the_first_save_comes_early_to_learn_its_cost():
    governor = Governor()
    assert governor.interval_s == 300
    governor.save_took(5)
    assert governor.interval_s == pytest.approx(daly_interval_s(5, 86400) + 5)


def test_described_in_plain_words():
    governor = Governor()
    assert governor.describe() == (
        "no step yet; a save is estimated to take 60 s; one every 5 min, optimal for one failure "
        "in 24 h 0 min"
    )
    for seconds in (0.1,) * 9 + (0.4,):
        governor.step_took(seconds)
    governor.save_took(8)
    assert governor.describe(3600) == (
        "a step takes 100 ms (a slow one 400 ms); a save takes up to 8 s; one every 20 min, "
        "optimal for one failure in 24 h 0 min; 60 min left: stops in 59 min, keeping 72 s for "
        "the last save"
    )
    assert format_seconds(12.34) == "12.3 s"


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"every_s": 0}, "every_s=0 must be more than 0"),
        ({"mtbf_s": math.inf}, "mtbf_s=inf must be more than 0 and finite"),
        ({"lead_s": -1}, "must not be negative"),
        ({"margin": 0.5}, "margin=0.5 must be at least 1"),
    ],
)
def test_wrong_paces_are_refused(given_, words):
    with pytest.raises(ConfigError, match=words):
        Pace(**given_)
