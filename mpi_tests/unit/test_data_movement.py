"""Cutting, forms and columns of data sets on their way: the arithmetic, without ranks."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hpctrain.data.columns import Dense, Objects, Ragged, describe_column
from hpctrain.data.gathering import find_trouble
from hpctrain.data.sharing import Layout
from hpctrain.data.staging import list_files
from hpctrain.data.table import (
    MESSAGE_BYTES,
    Arrivals,
    Table,
    flatten,
    share_length,
    split_bytes,
    split_rows,
)
from hpctrain.errors import ConfigError
from hpctrain.metrics import Confusion, _merge, _times

DTYPES = st.one_of(
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.boolean_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.byte_string_dtypes(min_len=1, max_len=5),
    hnp.unicode_string_dtypes(min_len=1, max_len=5),
)


@given(
    sizes=st.one_of(st.integers(0, 50), st.lists(st.integers(0, 50), max_size=40)),
    num_rows=st.integers(0, 60),
    limit=st.integers(1, 120),
)
def test_rows_are_cut_completely_and_into_pieces_that_fit(sizes, num_rows, limit):
    if isinstance(sizes, list):
        num_rows, each = len(sizes), sizes
        given_sizes = np.array(sizes, np.int64)
    else:
        each, given_sizes = [sizes] * num_rows, sizes
    pieces = list(split_rows(given_sizes, num_rows, limit))
    assert [row for a, b in pieces for row in range(a, b)] == list(range(num_rows))
    for start, stop in pieces:
        assert stop > start
        assert sum(each[start:stop]) <= limit or stop == start + 1


@given(num_bytes=st.integers(0, 2**40), limit=st.integers(2**25, MESSAGE_BYTES))
def test_messages_never_exceed_what_31_bits_count(num_bytes, limit):
    pieces = list(split_bytes(num_bytes, limit))
    assert sum(stop - start for start, stop in pieces) == num_bytes
    assert all(0 < stop - start <= limit < 2**31 for start, stop in pieces)
    assert all(a[1] == b[0] for a, b in pairwise(pieces))


def test_a_data_set_of_ten_gib_is_cut_without_touching_it():
    """Shares over 2 GiB: chunks and messages stay small."""
    row_bytes, total, size = 3 << 20, 3413, 2
    rows = share_length(total, 0, size)
    assert rows * row_bytes > 2**32
    chunks = list(split_rows(row_bytes, rows, 4 << 20))
    assert len(chunks) == rows
    assert sum(stop - start for start, stop in chunks) == rows


@given(total=st.integers(0, 1000), size=st.integers(1, 40))
def test_shares_are_complete_and_balanced(total, size):
    lengths = [share_length(total, rank, size) for rank in range(size)]
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) <= 1


def there_and_back(data, rows):
    """Read rows as bytes, and make them again somewhere else, some at a time."""
    table = Table(data)
    shapes = None if table.shapes is None else table.shapes[rows]
    room = Arrivals(pickle.loads(pickle.dumps(table.form)), len(rows), shapes)
    sizes = table.sizes if isinstance(table.sizes, int) else table.sizes[rows]
    for start, stop in split_rows(sizes, len(rows), 64):
        num_bytes = sizes * (stop - start) if isinstance(sizes, int) else sizes[start:stop].sum()
        out = np.zeros(int(num_bytes), np.uint8)
        assert table.read(rows[start:stop], out) == num_bytes
        room.write(np.arange(start, stop) if start % 2 else slice(start, stop), out)
    return room.finish()


@given(data=st.data(), dtype=DTYPES)
def test_arrays_of_every_dtype_and_layout_survive(data, dtype):
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=5))
    array = data.draw(hnp.arrays(dtype, shape))
    if data.draw(st.booleans()):
        array = np.asfortranarray(array)[::-1]
    rows = np.array(data.draw(st.lists(st.integers(0, len(array) - 1), max_size=9)), np.int64)
    got = there_and_back(array, rows)
    assert (got.dtype, got.shape) == (array.dtype, (len(rows), *array.shape[1:]))
    assert got.tobytes() == np.ascontiguousarray(array[rows]).tobytes()


@given(lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=9))
def test_ragged_lists_and_objects_survive(lengths):
    arrays = [np.full(shape, number, "f4") for number, shape in enumerate(lengths)]
    data = (arrays, [{"id": i, "s": "x" * i} for i in range(len(arrays))], np.arange(len(arrays)))
    rows = np.arange(len(arrays))[::-1].copy()
    got = there_and_back(data, rows)
    assert [a.tolist() for a in got[0]] == [a.tolist() for a in arrays[::-1]]
    assert got[1] == data[1][::-1]
    assert got[2].tolist() == rows.tolist()


def test_kinds_of_columns():
    assert describe_column(np.zeros((3, 2), "f4"), "x") == Dense(np.dtype("f4"), (2,))
    assert describe_column(torch.zeros(3), "x") == Dense(torch.float32, ())
    assert describe_column([np.zeros(2), np.zeros(3)], "x") == Ragged(np.dtype("f8"), 1)
    assert describe_column([np.zeros(2), np.zeros(3, "f4")], "x") == Objects()
    assert describe_column([np.zeros(2), torch.zeros(3)], "x") == Objects()
    assert describe_column(["a", 3], "x") == Objects()
    with pytest.raises(ConfigError, match="to_numpy"):
        describe_column(type("Frame", (), {"to_numpy": None})(), "x")


def test_forms_are_named_and_put_back():
    data = {"a": np.zeros(2), "b": (np.ones(2), {"c": [1, 2]})}
    outline, columns = flatten(data)
    assert outline.names == ("data['a']", "data['b'][0]", "data['b'][1]['c']")
    assert outline.build(columns).keys() == data.keys()
    assert outline.build([1, 2, 3]) == {"a": 1, "b": (2, {"c": 3})}
    other = Table({"a": np.zeros(2), "b": (np.ones(2, "f4"), {"c": [1, 2]})}).form
    assert "data['b'][0]" in other.difference(Table(data).form)


@given(
    indices=st.lists(st.integers(-2, 12), max_size=14),
    total=st.integers(0, 10),
)
def test_gather_finds_whatever_is_not_exactly_once(indices, total):
    counts = [len(indices) // 2, len(indices) - len(indices) // 2]
    trouble = find_trouble(np.array(indices, np.int64), counts, total)
    assert (trouble is None) == (sorted(indices) == list(range(total)))


@given(
    numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=30),
    cut=st.integers(0, 30),
)
def test_sums_are_exact_whoever_adds(numbers, cut):
    whole = math.fsum(numbers)
    parts = [*_merge(numbers[:cut]), *_merge(numbers[cut:])]
    assert math.fsum(parts) == whole
    assert len(_merge(numbers)) <= max(1, len(numbers))


@given(mean=st.floats(-1e6, 1e6), count=st.integers(0, 10**12))
def test_a_mean_times_its_count_is_exact(mean, count):
    assert sum(map(Fraction, _times(mean, count)), Fraction()) == Fraction(mean) * count


def test_confusion_counts_what_it_is_told():
    counting = Confusion(3)
    counting.update([0, 1, 1, 2], torch.tensor([0, 1, 2, 2]))
    assert counting.counts.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    with pytest.raises(ConfigError, match="2 predicted classes for 1"):
        counting.update([0, 1], [0])
    with pytest.raises(ConfigError, match="whole numbers"):
        counting.update([0.5], [0])


@given(
    rows=st.integers(0, 20),
    widths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_a_layout_places_columns_aligned_and_apart(rows, widths):
    table = Table(tuple(np.full((rows, w), n, "u2") for n, w in enumerate(widths)))
    layout = Layout(table.form.outline, table.form.kinds, rows)
    starts = layout.starts
    assert all(start % 64 == 0 for start in starts)
    memory = np.zeros(starts[-1], np.uint8)
    for start, column, values in zip(starts, layout.columns, table.values, strict=False):
        assert start + column.row_bytes * rows <= starts[-1]
        memory[start : start + column.row_bytes * rows] = values.reshape(-1).view(np.uint8)
    for got, values in zip(layout.build(memory), table.values, strict=True):
        assert np.array_equal(got, values)
        assert not got.flags.writeable


def test_a_listing_changes_with_its_files(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    before = list_files(tmp_path)
    assert before.num_bytes == 1
    assert list_files(tmp_path).key(tmp_path) == before.key(tmp_path)
    (tmp_path / "b").write_bytes(b"22")
    assert list_files(tmp_path).num_bytes == 3
    assert list_files(tmp_path).key(tmp_path) != before.key(tmp_path)
