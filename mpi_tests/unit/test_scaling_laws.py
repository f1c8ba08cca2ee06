"""Laws of scaling: fits find what the data were made of, and say when they cannot tell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.bench.laws import (
    LAWS,
    KarpFlatt,
    Law,
    choose_law,
    fall_below,
    fit_laws,
    karp_flatt,
    trend,
)
from hpctrain.errors import ConfigError

RANKS = [n for n in (2, 4, 8, 16) for _ in range(3)]


def speedups(name, serial, noise=0.0, seed=0):
    exact = LAWS[name](np.asarray(RANKS, dtype=float), np.asarray(serial))
    return list(exact * np.exp(np.random.default_rng(seed).normal(0, noise, len(RANKS))))


@settings(max_examples=10, deadline=None)
@given(name=st.sampled_from(["Amdahl", "Gustafson"]), serial=st.floats(0.02, 0.6))
def test_a_law_without_noise_is_found_and_chosen(name, serial):
    values = speedups(name, serial)
    best, clearly = choose_law(fit_laws(RANKS, values), dict(zip(RANKS, values, strict=True)))
    assert (best.name, clearly) == (name, True)
    assert best.serial == pytest.approx(serial, abs=1e-3)
    assert best.low <= best.serial <= best.high
    assert best.speedup(1) == pytest.approx(1)
    assert best.speedup(16) == pytest.approx(
        float(LAWS[name](np.float64(16), np.float64(serial))), rel=0.02
    )


def test_intervals_contain_the_truth_about_as_often_as_they_say():
    inside = 0
    for seed in range(20):
        laws = {law.name: law for law in fit_laws(RANKS, speedups("Amdahl", 0.1, 0.02, seed))}
        inside += laws["Amdahl"].low <= 0.1 <= laws["Amdahl"].high
    assert inside >= 16  # 19 of 20 are expected at 95 %


def test_ideal_data_are_called_ideal_and_never_fall_below():
    values = speedups("ideal", 0.0)
    best, _ = choose_law(fit_laws(RANKS, values), dict(zip(RANKS, values, strict=True)))
    assert best.name == "ideal"
    assert fall_below(best) is None


@settings(max_examples=50, deadline=None)
@given(name=st.sampled_from(["Amdahl", "Gustafson"]), serial=st.floats(0.21, 0.9))
def test_efficiency_is_at_the_limit_where_a_law_says_it_falls_below(name, serial):
    law = Law(name=name, serial=serial, low=0, high=1, aicc=None, error=0)
    where = fall_below(law, 0.8)
    assert law.speedup(where) / where == pytest.approx(0.8)
    assert law.speedup(where + 1) / (where + 1) < 0.8


def curve(law, noise=0.001):
    return {n: (law(n), law(n) * (1 - noise), law(n) * (1 + noise)) for n in (1, 2, 4, 8)}


@pytest.mark.parametrize(
    ("law", "what"),
    [
        (lambda n: 1 / (0.05 + 0.95 / n), "level"),
        (lambda n: n / (1 + 0.02 * n * n), "rises"),
        (lambda n: 0.3 + 0.7 * n, "falls"),
        (lambda n: n, "zero"),
        (lambda n: n**1.1, "negative"),
        (lambda n: {1: 1, 2: 1.9, 4: 2.5, 8: 6.4}[n], "mixed"),
    ],
)
def test_what_karp_flatt_does_under_each_law(law, what):
    series = karp_flatt(curve(law))
    assert [each.num_ranks for each in series] == [2, 4, 8]
    assert all(each.low <= each.fraction <= each.high for each in series)
    assert trend(series) == what
    assert trend(series, is_repeated=False) == "unrepeated"
    assert trend([KarpFlatt(num_ranks=2, fraction=0.1, low=0.1, high=0.1)]) == "unknown"


def test_karp_flatt_is_the_serial_fraction_of_amdahl():
    series = karp_flatt(curve(lambda n: 1 / (0.05 + 0.95 / n)))
    assert [each.fraction for each in series] == pytest.approx([0.05] * 3)


@pytest.mark.parametrize(
    ("ranks", "values"),
    [([2, 2], [1.0, 1.1]), ([2, 4], [1.0, 0.0]), ([2, 4], [1.0]), ([1, 2], [1.0, 2.0])],
)
def test_data_that_no_law_can_be_fitted_to_are_refused(ranks, values):
    with pytest.raises(ConfigError):
        fit_laws(ranks, values)


def test_two_data_fit_every_law_and_none_is_clear():
    laws = fit_laws([2, 4], [1.6, 2.4])
    assert choose_law(laws, {2: 1.6, 4: 2.4})[1] is False
    amdahl = next(law for law in laws if law.name == "Amdahl")
    assert (amdahl.low, amdahl.high) == (0.0, 1.0)  # too few data for an interval
