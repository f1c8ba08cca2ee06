"""Global orders are permutations, and depend on seed and epoch alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.shuffle import LARGEST_IN_MEMORY, Order, choose_kind
from hpctrain.errors import ConfigError

KINDS = st.sampled_from(["keyed", "numpy", "stored"])
SEEDS = st.integers(0, 2**63 - 1)


def order(kind="keyed", num=1000, seed=3, epoch=0):
    return Order(kind=kind, num_samples=num, seed=seed, epoch=epoch)


@given(KINDS, st.integers(0, 3000), SEEDS, st.integers(0, 1000))
def test_every_order_is_a_permutation(kind, num, seed, epoch):
    found = order(kind, num, seed, epoch).between(0, num)
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(num))


@given(st.integers(1, 2**62), SEEDS, st.data())
def test_the_keyed_order_needs_no_memory(num, seed, data):
    start = data.draw(st.integers(0, num - 1))
    positions = np.arange(start, min(start + 200, num))
    found = order("keyed", num, seed).at(positions)
    assert len(set(found.tolist())) == len(positions)
    assert found.min() >= 0
    assert found.max() < num


@given(KINDS, st.integers(1, 500), st.integers(1, 7), st.data())
def test_pieces_are_pieces_of_the_whole(kind, num, step, data):
    whole = order(kind, num).between(0, num)
    start = data.draw(st.integers(0, num))
    assert np.array_equal(order(kind, num).between(start, num, step), whole[start::step])
    assert np.array_equal(order(kind, num).at(np.array([num - 1])), whole[-1:])


@pytest.mark.parametrize("kind", ["keyed", "numpy"])
def test_seeds_and_epochs_give_new_orders(kind):
    first = order(kind).between(0, 1000)
    for other in (order(kind, seed=4), order(kind, epoch=1), order(kind).of_epoch(7)):
        assert (other.between(0, 1000) == first).mean() < 0.02
        assert other.fingerprint() != order(kind).fingerprint()
    assert order(kind).fingerprint() == order(kind).fingerprint()


def chi_square(values, num_values):
    """How far from even, per degree of freedom; for many draws about 1."""
    bins = min(num_values, 16)
    counts = np.bincount(values * bins // num_values, minlength=bins)
    bounds = -(-np.arange(bins + 1) * num_values // bins)
    expected = len(values) * np.diff(bounds) / num_values
    return ((counts - expected) ** 2 / expected).sum() / (bins - 1)


@pytest.mark.parametrize("num", [7, 100, 4096])
def test_the_keyed_order_is_even(num):
    """Where positions go, and how far neighbours part, is spread as chance would have it."""
    both = np.array([order(num=num, seed=s).at(np.array([0, 1])) for s in range(1500)])
    distance = (both[:, 1] - both[:, 0]) % num - 1  # two positions never meet
    # Of 6 degrees of freedom or more, chance exceeds 5 times the mean once in 10^4 at most.
    assert chi_square(both[:, 0], num) < 5
    assert chi_square(both[:, 1], num) < 5
    assert chi_square(distance, num - 1) < 5


def test_keyed_orders_do_not_keep_neighbours():
    found = order(num=10**12).between(5 * 10**11, 5 * 10**11 + 100_000)
    steps = np.abs(np.diff(found))
    assert abs(steps.mean() / (10**12 / 3) - 1) < 0.02  # the mean distance of two random points
    correlation = np.corrcoef(found[:-1].astype(float), found[1:].astype(float))[0, 1]
    assert abs(correlation) < 0.015


def test_small_data_are_shuffled_in_memory():
    assert choose_kind(LARGEST_IN_MEMORY) == "numpy"
    assert choose_kind(LARGEST_IN_MEMORY + 1) == "keyed"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: order("riffle"), "order 'riffle' is unknown"),
        (lambda: order(num=-1), "num_samples=-1"),
        (lambda: order(num=2**62 + 1), r"from 0 to 2\*\*62"),
        (lambda: order(epoch=-1), "epoch=-1"),
        (lambda: order("numpy").at(np.array([1000])), "from 0 to 999"),
        (lambda: order().at(np.array([-1])), "from 0 to 999"),
        (lambda: order("numpy").between(0, 1001), "from 0 to 999"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
