"""What tensors look like while they travel: pure arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.engines import Op, encoding, rows
from hpctrain.engines.local import LocalEngine
from hpctrain.engines.rows import parts_of
from hpctrain.errors import ConfigError

FLOATS = st.lists(st.floats(width=32), min_size=1, max_size=6)


def never(dtype, op):
    """An engine that combines 32 and 64 bits only, as Horovod."""
    return dtype in (torch.float32, torch.float64, torch.int32, torch.int64)


def combined(tensors, op, sends):
    """Send through the wire without one: encode each, combine, decode."""
    size = len(tensors)
    flats = [encoding.flatten(tensor).clone() for tensor in tensors]
    packed = [encoding.encode(flat, op, sends, size, owned=True) for flat in flats]
    assert len({on_wire for _, on_wire in packed}) == 1
    stacked = torch.stack([flat for flat, _ in packed])
    on_wire = packed[0][1]
    if on_wire is Op.SUM:
        total = stacked.sum(0, dtype=stacked.dtype)
    else:
        total = stacked.amin(0) if on_wire is Op.MIN else stacked.amax(0)
    return encoding.decode(total, tensors[0].dtype, op, size)


@pytest.mark.parametrize("sends", [never, lambda dtype, op: True])
@pytest.mark.parametrize("dtype", encoding.DTYPES)
def test_the_wire_changes_no_result(dtype, sends):
    tensors = [((torch.arange(12) * (r + 1)) % 7).to(dtype) for r in range(3)]
    for op in (Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX):
        try:
            encoding.check_op(tensors[0], op, call="allreduce", ops=frozenset(Op), engine="any")
        except ConfigError:
            continue
        stacked = torch.stack(tensors)
        if dtype is torch.bool:
            want = stacked.all(0) if op is Op.MIN else stacked.any(0)
        elif op in (Op.MIN, Op.MAX):
            want = stacked.amin(0) if op is Op.MIN else stacked.amax(0)
        else:
            want = stacked.sum(0, dtype=dtype) / (3 if op is Op.AVERAGE else 1)
        torch.testing.assert_close(combined(tensors, op, sends), want.to(dtype))


@given(FLOATS, FLOATS)
def test_min_and_max_are_torchs_nan_and_infinities_included(left, right):
    count = min(len(left), len(right))
    for dtype in (torch.float32, torch.float64):
        pair = [torch.tensor(each[:count], dtype=dtype) for each in (left, right)]
        for op, whole in ((Op.MIN, torch.amin), (Op.MAX, torch.amax)):
            got = combined(pair, op, never)
            assert torch.equal(got.nan_to_num(7.5), whole(torch.stack(pair), 0).nan_to_num(7.5))
            backwards = combined(pair[::-1], op, never)
            assert torch.equal(got.view(torch.uint8), backwards.view(torch.uint8))


def test_an_average_in_float16_does_not_overflow():
    tensors = [torch.full((2,), 60000.0, dtype=torch.float16)] * 4
    assert combined(tensors, Op.AVERAGE, lambda dtype, op: True).tolist() == [60000.0] * 2


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_tensor_splits(num_rows, size):
    lengths = [len(part) for part in torch.zeros(num_rows).tensor_split(size)]
    assert encoding.shares(num_rows, size) == lengths


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 9))
def test_rounds_cover_everything_once(counts, most):
    seen = [0] * len(counts)
    flat = torch.arange(sum(counts))
    parts = [[] for _ in counts]
    for start, stop in encoding.rounds(max(counts), most):
        clipped = encoding.clip(counts, start, stop)
        assert max(clipped) <= most
        for i, segment in enumerate(encoding.segments(flat, counts, start, stop)):
            assert len(segment) == clipped[i]
            parts[i] += segment.tolist()
            seen[i] += clipped[i]
    assert seen == counts
    assert [value for part in parts for value in part] == flat.tolist()


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(-2, 2)), max_size=8))
def test_parts_are_ordered_by_key_then_rank(table):
    parts = parts_of(table)
    assert sorted(r for part in parts.values() for r in part) == [
        r for r, (color, _) in enumerate(table) if color is not None
    ]
    for color, part in parts.items():
        assert all(table[r][0] == color for r in part)
        assert part == sorted(part, key=lambda r: (table[r][1], r))


def test_splits_are_checked():
    assert rows.check_splits(6, None, 3) is None
    assert rows.check_splits(3, [1, 0, 2], 3) is None
    assert "give splits" in rows.check_splits(7, None, 3)
    assert "one per rank" in rows.check_splits(3, [3], 3)
    assert "sum to 4" in rows.check_splits(3, [4, 0, 0], 3)
    assert "0 or more" in rows.check_splits(3, [4, -1, 0], 3)


def test_descriptions_do_not_depend_on_the_rank():
    tensor = torch.zeros(3, 2)
    assert encoding.describe("allreduce", "bucket 1", tensor) == "allreduce bucket 1 float32 (3, 2)"
    assert encoding.describe("allgather", "", tensor, rows_vary=True) == "allgather float32 (*, 2)"


def test_adasum_is_not_cut(monkeypatch):
    engine = LocalEngine(torch.device("cpu"))
    monkeypatch.setattr(LocalEngine, "chunk", 2)
    with pytest.raises(ConfigError, match="at most 2"):
        engine.allreduce_(torch.ones(3), Op.ADASUM)


def test_inference_tensors_and_subnormals_pass():
    engine = LocalEngine(torch.device("cpu"))
    with torch.inference_mode():
        assert engine.allreduce_(torch.ones(2)).tolist() == [1.0, 1.0]
    tiny = torch.tensor([5e-324, -0.0, math.inf], dtype=torch.float64)
    assert engine.allreduce_(tiny.clone(), Op.MAX).tolist() == tiny.tolist()
