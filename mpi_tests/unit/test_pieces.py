"""Pieces of tensors: the arithmetic, and checkpoints that one process writes and reads."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint import Piece, Region, read_checkpoint, verify, write_checkpoint
from hpctrain.checkpoint.format import read_manifest
from hpctrain.errors import CheckpointError
from hpctrain.pieces import regions_of_run, trouble_with_cover

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(st.data())
def test_a_run_of_elements_is_a_few_blocks(data):
    shape = data.draw(shapes)
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    regions = regions_of_run(shape, start, stop)
    numbers = np.arange(total).reshape(shape)
    whole = Region.whole(shape)
    found = [number for r in regions for number in numbers[r.slices_in(whole)].reshape(-1)]
    assert found == list(range(start, stop))
    assert len(regions) <= max(1, 2 * len(shape) - 1)
    for region in regions:
        run = region.run_in(whole)
        assert run is not None
        assert len(run) == region.num_elements


@given(st.data())
def test_whether_a_block_is_consecutive(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    inner = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(offset, shape, strict=True))
    region, whole = Region(offset, inner), Region.whole(shape)
    found = np.arange(math.prod(shape)).reshape(shape)[region.slices_in(whole)].reshape(-1)
    run = region.run_in(whole)
    if run is not None:
        assert found.tolist() == list(run)
    else:
        assert (np.diff(found) != 1).any()


@given(st.data())
def test_blocks_that_make_up_a_tensor(data):
    """Any cut along all dimensions is a cover; without one block it is none, twice one neither."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    bounds = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    cuts = [[(a, b - a) for a, b in itertools.pairwise(each)] for each in bounds]
    regions = [Region(*zip(*spans, strict=True)) for spans in itertools.product(*cuts)]
    holders = {region: [rank] for rank, region in enumerate(regions)}
    assert trouble_with_cover(shape, holders) is None
    left_out = data.draw(st.sampled_from(regions))
    rest = {region: ranks for region, ranks in holders.items() if region != left_out}
    assert "elements" in trouble_with_cover(shape, rest)
    if len(regions) > 1:
        assert "overlap" in trouble_with_cover(shape, {**holders, Region.whole(shape): [99]})


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (Piece(torch.ones(2), (3,), (4,)), r"\[3:5\].*shape \(4,\).*inside"),
        (Piece(torch.ones(2), (0, 0), (4,)), "as many dimensions"),
        (Piece(torch.ones(2, 1), 0, (4, 1)), "flat tensor"),
        (Piece(torch.ones(3), 2, (2, 2)), "elements 2 to 5 of 4"),
        (Piece(torch.ones(2), (0,), (4,)), "only 2 of 4 elements.*rank 0 holds"),
    ],
)
def test_wrong_pieces_are_refused_by_name(tmp_path, piece, text):
    with pytest.raises(CheckpointError, match=f"(?s)a.*{text}"):
        write_checkpoint(tmp_path, {"a": piece}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_one_process_may_hold_all_of_a_tensor(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    piece = Piece(whole.reshape(-1), 0, (3, 4))
    path = write_checkpoint(tmp_path, {"a": piece, "again": piece, "b": whole}, step=1)
    assert verify(path) == []
    state = read_checkpoint(path)
    assert torch.equal(state["a"], whole)
    assert state["again"] is state["a"]
    assert read_manifest(path).version == 2
    assert read_manifest(write_checkpoint(tmp_path, {"b": whole}, step=1)).version == 1
