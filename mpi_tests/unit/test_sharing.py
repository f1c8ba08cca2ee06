"""How work and memory are divided among the ranks of a node."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.engines import Op
from hpctrain.engines.node import combine, slice_bounds
from hpctrain.log import format_bytes
from hpctrain.update.pieces import StateEntry, lay_out
from hpctrain.update.sharing import (
    Fragment,
    cut_elements,
    describe_shares,
    divide_parameters,
    some_names,
)
from hpctrain.world.barrier import must_sleep
from hpctrain.world.shared_memory import Backing, _attach, page_slices, places

GRAIN = 1024
SIZES = st.lists(st.integers(0, 9000), min_size=1, max_size=12)
RANKS = st.integers(1, 9)


def cover(shares, sizes):
    """All fragments in order, after checking that they cover every parameter once."""
    fragments = [fragment for share in shares for fragment in share]
    for index, size in enumerate(sizes):
        own = [f for f in fragments if f.parameter == index]
        assert own[0].start == 0
        assert own[-1].stop == size
        assert all(a.stop == b.start for a, b in itertools.pairwise(own))
    return fragments


@given(SIZES, st.data(), RANKS, RANKS)
def test_cuts_are_complete_in_order_and_the_same_on_every_node(sizes, data, num_cells, fewer):
    weights = [data.draw(st.sampled_from([2, 4, 8, 16])) for _ in sizes]
    largest = cut_elements(sizes, weights, num_cells=num_cells, num_ranks=num_cells)
    fragments = cover(largest, sizes)
    assert fragments == sorted(fragments, key=lambda f: (f.parameter, f.start))
    assert all(f.start % GRAIN == 0 for f in fragments)
    smaller = cut_elements(sizes, weights, num_cells=num_cells, num_ranks=min(fewer, num_cells))
    assert [f for share in smaller for f in share] == fragments
    total = sum(s * w for s, w in zip(sizes, weights, strict=True))
    for share in largest:  # a cell ends within half a grain of where it should, both ends
        load = sum((f.stop - f.start) * weights[f.parameter] for f in share)
        assert load <= total / num_cells + GRAIN * max(weights) + num_cells


def test_a_large_parameter_is_cut_evenly():
    shares = cut_elements([64 * GRAIN], [4], num_cells=4, num_ranks=4)
    assert shares == [[Fragment(0, 16 * GRAIN * r, 16 * GRAIN * (r + 1))] for r in range(4)]
    two = cut_elements([64 * GRAIN], [4], num_cells=4, num_ranks=2)
    assert [len(share) for share in two] == [2, 2]


@given(SIZES, RANKS)
def test_whole_parameters_are_divided_by_size(sizes, num_ranks):
    shares = divide_parameters(sizes, num_ranks=num_ranks)
    fragments = [f for share in shares for f in share]
    assert sorted(f.parameter for f in fragments) == list(range(len(sizes)))
    assert all((f.start, f.stop) == (0, sizes[f.parameter]) for f in fragments)
    loads = [sum(f.stop + 1 for f in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes) + 1


@given(SIZES, RANKS, st.sets(st.integers(0, 11)))
def test_state_is_laid_out_once_and_apart(sizes, num_ranks, narrow):
    shares = cut_elements(sizes, [4] * len(sizes), num_cells=num_ranks, num_ranks=num_ranks)
    entries = []
    for f in (f for share in shares for f in share):
        length = (f.stop - f.start,)
        dtype, item = ("bfloat16", 2) if f.parameter in narrow else ("float32", 4)
        entries.append(StateEntry(f.parameter, f.start, "mean", dtype, item, length, True))
        entries.append(StateEntry(f.parameter, f.start, "step", "float32", 4, (), False))
    slots, num_bytes = lay_out(entries, sizes)
    shuffled, same = lay_out(reversed(entries), sizes)
    assert (slots, num_bytes) == (shuffled, same)
    ranges = []
    for (parameter, start, key), slot in slots.items():
        item = 2 if key == "mean" and parameter in narrow else 4
        assert slot.num_elements == (sizes[parameter] if key == "mean" else 1)
        assert (start is None) == (key == "mean")
        assert slot.offset % 64 == 0
        ranges.append((slot.offset, slot.offset + slot.num_elements * item))
    ranges.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert not ranges or ranges[-1][1] <= num_bytes
    assert len(slots) == len({e.parameter for e in entries}) + len(entries) // 2


@given(st.integers(1, 1 << 22), st.integers(1, 9), st.data())
def test_pages_are_reserved_once_each(num_bytes, num_ranks, data):
    ends = sorted(data.draw(st.integers(0, num_bytes)) for _ in range(num_ranks))
    slices = list(zip([0, *ends[:-1]], ends, strict=True))
    for given_slices in (None, slices):
        parts = page_slices(num_bytes, num_ranks, given_slices)
        assert len(parts) == num_ranks
        assert parts[0][0] == 0
        assert parts[-1][1] == num_bytes
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        assert all(start % mmap.PAGESIZE == 0 or start == num_bytes for start, _ in parts)


@given(st.integers(0, 100_000), st.integers(1, 9))
def test_slices_are_aligned_and_complete(num_elements, parts):
    bounds = slice_bounds(num_elements, parts)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_elements
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert all(start % 64 == 0 or start == num_elements for start, _ in bounds)
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 2 * 64


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_sums_are_made_in_the_order_of_the_ranks(dtype, count):
    length = 3 * (1 << 16) + 7 if count == 3 else 1000  # over several blocks
    torch.manual_seed(count)
    parts = [torch.randn(length, dtype=dtype) * 10.0**i for i in range(count)]
    total = torch.empty(length, dtype=dtype)
    combine(parts, total)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected = expected + part
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 4])
def test_16_bits_are_added_in_float32(dtype, count):
    parts = [torch.ones(100, dtype=dtype) for _ in range(count)]
    parts[0].fill_(torch.finfo(dtype).eps ** -1 * 4)  # adding one at a time would add nothing
    total = torch.empty(100, dtype=dtype)
    combine(parts, total)
    wide = torch.stack([part.float() for part in parts]).sum(0)
    assert torch.equal(total, wide.to(dtype))
    tiny = [torch.full((8,), 1.0 + (i == 0) * 2048, dtype=torch.float16) for i in range(4)]
    combine(tiny, out := torch.empty(8, dtype=torch.float16))
    assert out[0] == 2052  # 2049 is 2048 in float16


@pytest.mark.parametrize(("op", "call"), [(Op.MIN, torch.amin), (Op.MAX, torch.amax)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_least_and_largest(op, call, dtype):
    parts = [torch.randint(-99, 99, (50,)).to(dtype) for _ in range(3)]
    total = torch.empty(50, dtype=dtype)
    combine(parts, total, op)
    assert torch.equal(total, call(torch.stack(parts), 0))


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (64 << 20, "64.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_bytes_in_words(number, words):
    assert format_bytes(number) == words
    assert format_bytes(2.0**60).endswith("TiB")


def test_places_say_why_they_do_not_do(tmp_path):
    missing = Path("/nowhere/at/all")
    good, refused = places(4096, [missing, tmp_path])
    assert [backing.folder for backing in good] == [tmp_path]
    assert refused == [f"{missing} cannot be used (No such file or directory)"]
    assert good[0].why == f"in {tmp_path} since {refused[0]}"
    good, refused = places(1 << 60, [tmp_path])
    assert not good
    assert str(tmp_path) in refused[0]
    assert "free" in refused[0]


def test_ranks_sleep_when_threads_exceed_cores():
    assert not must_sleep([1, 1], 2)
    assert must_sleep([2, 1], 2)


def test_shares_are_told_in_few_words():
    names = ["a", "b", "c", "d", "e"]
    sizes = [2048, 10, 10, 4096, 10]
    shares = [
        [Fragment(0, 0, 2048), Fragment(1, 0, 10), Fragment(2, 0, 10), Fragment(3, 0, 1024)],
        [Fragment(3, 1024, 4096), Fragment(4, 0, 10)],
        [],
        [Fragment(0, 0, 2048), Fragment(2, 0, 10), Fragment(4, 0, 10)],
        [Fragment(0, 0, 2048)],
    ]
    assert dict(describe_shares(shares, names, sizes)) == {
        "local rank 0": "a to c, d[:1,024]",
        "local rank 1": "d[1,024:], e",
        "local rank 2": "nothing",
        "local rank 3": "a, c, e",
        "": "the other 1 of the node likewise",
    }
    assert some_names(names) == "a, b, c and 2 more"


def test_a_file_that_a_rank_does_not_see_is_no_lack_of_space(tmp_path):
    backing = Backing(folder=tmp_path, free_bytes=1, why="")
    told = _attach((backing, str(tmp_path / "other")), -1, (0, 4096), 4096, ())
    assert isinstance(told, str)
    assert f"does not see the file that another rank of its node created in {tmp_path}" in told
    assert "one container" in told
    assert "space" not in told
    file = tmp_path / "directory"
    file.mkdir()
    told = _attach((backing, str(file)), -1, (0, 4096), 4096, ())
    assert isinstance(told, str)
    assert "cannot open the file" in told
