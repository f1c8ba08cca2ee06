"""Who has which samples: disjoint, complete, balanced, for any size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.partition import (
    block,
    cyclic,
    file_spans,
    quotas,
    split,
    stratified,
    weighted,
    whole_files,
)
from hpctrain.errors import ConfigError

SIZES = st.integers(0, 500)
PARTS = st.integers(1, 40)
WEIGHTS = st.lists(st.floats(0, 100), min_size=1, max_size=20).filter(lambda w: sum(w) > 1e-3)


def check_complete(parts, expected):
    assert sorted(i for part in parts for i in part) == list(expected)


def check_balanced(parts):
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(SIZES, PARTS, st.sampled_from([block, cyclic]))
def test_block_and_cyclic_are_exact(num, size, rule):
    parts = [rule(num, size, part) for part in range(size)]
    check_complete(parts, range(num))
    check_balanced(parts)


@given(SIZES, PARTS, st.data())
def test_cyclic_from_anywhere_keeps_the_owners(num, size, data):
    start = data.draw(st.integers(0, num))
    parts = [cyclic(num, size, part, start=start) for part in range(size)]
    check_complete(parts, range(start, num))
    check_balanced(parts)
    assert all(position % size == part for part in range(size) for position in parts[part])


def test_a_trillion_samples_cost_nothing():
    assert len(block(10**12, 7, 3)) in (10**12 // 7, 10**12 // 7 + 1)
    assert cyclic(10**12, 7, 3)[-1] < 10**12


@given(SIZES, WEIGHTS)
def test_weighted_follows_the_weights(num, weights):
    parts = [weighted(num, weights, part) for part in range(len(weights))]
    check_complete(parts, range(num))
    sizes = [len(part) for part in parts]
    assert sizes == quotas(num, weights)
    positive = sum(weight > 0 for weight in weights)
    if num >= positive:
        assert all(size > 0 for size, weight in zip(sizes, weights, strict=True) if weight > 0)
    shares = [num * weight / sum(weights) for weight in weights]
    needy = sum(share < 1 for share in shares)  # the larger parts give to those that have none
    for size, share, weight in zip(sizes, shares, weights, strict=True):
        assert share - 1 - needy - 1e-6 < size < share + 1 + 1e-6
        assert weight > 0 or size == 0


@given(SIZES, st.integers(1, 20))
def test_equal_weights_are_blocks(num, size):
    parts = [weighted(num, [2.5] * size, part) for part in range(size)]
    assert parts == [block(num, size, part) for part in range(size)]


@given(st.lists(st.sampled_from("abcd"), max_size=200), PARTS)
def test_stratified_spreads_every_label(labels, size):
    parts = [stratified(np.array(labels, dtype=str), size, part) for part in range(size)]
    check_complete([part.tolist() for part in parts], range(len(labels)))
    check_balanced(parts)
    for label in "abcd":
        counts = [Counter(labels[i] for i in part)[label] for part in parts]
        assert max(counts) - min(counts) <= 1
    assert all((np.diff(part) > 0).all() for part in parts)


@given(st.lists(st.integers(0, 30), max_size=20), PARTS)
def test_files_are_read_row_by_row_exactly_once(sizes, num_parts):
    parts = [
        [(s.file, row) for s in file_spans(sizes, num_parts, p) for row in range(s.start, s.stop)]
        for p in range(num_parts)
    ]
    check_complete(parts, [(file, row) for file, size in enumerate(sizes) for row in range(size)])
    check_balanced(parts)


@given(st.lists(st.integers(0, 30), max_size=20), PARTS)
def test_whole_files_have_one_reader(sizes, num_parts):
    parts = [whole_files(sizes, num_parts, part) for part in range(num_parts)]
    check_complete(parts, range(len(sizes)))
    loads = [sum(sizes[file] for file in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(SIZES, st.lists(st.integers(0, 10), min_size=1, max_size=5).filter(any))
def test_split_by_fractions_never_overlaps_and_is_complete(num, tenths):
    fractions = {str(i): int(1000 * t / sum(tenths)) / 1000 for i, t in enumerate(tenths)}
    parts = split(num, fractions)
    flat = [i for part in parts.values() for i in part]
    assert flat == list(range(len(flat)))
    whole = split(num, {"train": 0.7, "validation": 0.1, "test": 0.2})
    check_complete(whole.values(), range(num))
    assert abs(len(whole["test"]) - 0.2 * num) <= 1


def test_split_by_counts():
    assert split(10, {"train": 6, "test": 3}) == {"train": range(6), "test": range(6, 9)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block(-1, 2, 0), "num_samples=-1"),
        (lambda: block(5, 0, 0), "num_parts=0"),
        (lambda: cyclic(5, 2, 2), "part=2 of num_parts=2"),
        (lambda: cyclic(5, 2, 1, start=6), "start=6"),
        (lambda: quotas(5, []), "one weight must be above 0"),
        (lambda: quotas(5, [0.0, 0.0]), "one weight must be above 0"),
        (lambda: quotas(5, [1.0, -1.0]), "must not be negative"),
        (lambda: quotas(5, [1.0, float("nan")]), "must not be negative"),
        (lambda: quotas(5, [1.0, float("inf")]), "finite"),
        (lambda: stratified([[1]], 2, 0), r"shape \(1, 1\)"),
        (lambda: split(5, {"train": 4, "test": 2}), "do not fit"),
        (lambda: split(5, {"train": 0.9, "test": 0.2}), "do not fit"),
        (lambda: split(5, {}), "do not fit"),
        (lambda: file_spans([3, -1], 2, 0), "must not be negative"),
        (lambda: whole_files([3], 2, 5), "part=5"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
