"""The contract of all engines, on every one that is built; expectations from rank and size."""

from __future__ import annotations

import functools
import itertools
import operator

import pytest
import torch

from hpctrain.engines import Engine, Op
from hpctrain.errors import ConfigError
from mpi_tests.ranks.engines_kit import DTYPES, OPS, allowed, close, expected, values


def test_allreduce_of_every_dtype(engine):
    for op, dtype in itertools.product(OPS, DTYPES):
        tensor = values(engine.rank, dtype=dtype)
        if not allowed(op, dtype):
            with pytest.raises(ConfigError, match=str(dtype).removeprefix("torch.")):
                engine.allreduce_(tensor, op)
            continue
        assert engine.allreduce_(tensor, op) is tensor
        close(tensor, expected(engine.size, op, dtype=dtype))


def test_reduce_scatter_of_every_dtype_and_remainder(engine):
    dtypes = (torch.bfloat16, torch.float64, torch.complex64, torch.int16, torch.bool)
    shapes = ((5, 2), (1,), (engine.size * 2, 3), (0, 2))
    for op, dtype, shape in itertools.product(OPS, dtypes, shapes):
        if allowed(op, dtype):
            given = values(engine.rank, shape, dtype)
            part = engine.reduce_scatter(given, op)
            whole = expected(engine.size, op, shape, dtype)
            close(part, whole.tensor_split(engine.size)[engine.rank])
            close(given, values(engine.rank, shape, dtype))


def test_moving_every_dtype(engine):
    size, rank = engine.size, engine.rank
    for dtype in DTYPES:
        root = size - 1
        close(engine.broadcast_(values(rank, dtype=dtype), root), values(root, dtype=dtype))
        gathered = engine.allgather(values(rank, (rank, 2), dtype))
        close(gathered, torch.cat([values(r, (r, 2), dtype) for r in range(size)]))


def test_unequal_sizes_with_zeros(engine):
    for empty in ("none", "one", "all"):
        check_unequal_sizes(engine, empty)


def check_unequal_sizes(engine, empty):
    size, rank = engine.size, engine.rank

    def num_rows(sender, receiver=0):
        if empty == "all" or (empty == "one" and sender == 0):
            return 0
        return (sender * 2 + receiver) % 3

    gathered = engine.allgather(values(rank, (num_rows(rank), 3)))
    close(gathered, torch.cat([values(r, (num_rows(r), 3)) for r in range(size)]))
    splits = [num_rows(rank, to) for to in range(size)]
    sent = torch.arange(sum(splits) * 2).view(-1, 2) + 100 * rank
    came, received = engine.alltoall(sent, splits)
    assert received == [num_rows(r, rank) for r in range(size)]
    parts = []
    for sender in range(size):
        counts = [num_rows(sender, to) for to in range(size)]
        theirs = torch.arange(sum(counts) * 2).view(-1, 2) + 100 * sender
        parts.append(theirs.split(counts)[rank])
    close(came, torch.cat(parts))


def layouts(rank):
    yield "transposed", values(rank, (4, 6)).t()
    yield "strided", values(rank, (4, 6))[:, ::2]
    yield "row", values(rank, (4, 6))[1]
    yield "0-d", values(rank, (4, 6))[1, 1]
    yield "channels last", values(rank, (2, 3, 4, 5)).to(memory_format=torch.channels_last)
    yield "conjugate", values(rank, (3,), torch.complex128).conj()
    yield "imaginary of a conjugate", values(rank, (3,), torch.complex128).conj().imag
    yield "empty", values(rank, (0, 6))


def test_layouts_in_place_leave_the_rest_alone(engine):
    for index, (name, view) in enumerate(layouts(engine.rank)):
        whole = view._base if view._base is not None else view
        every = [list(layouts(r))[index][1] for r in range(engine.size)]
        want = functools.reduce(operator.add, [each.clone() for each in every])
        total = whole.clone().sum() - view.clone().sum()
        engine.allreduce_(view)
        torch.testing.assert_close(view.clone(), want, msg=name)
        if name in ("strided", "row", "0-d"):
            torch.testing.assert_close(whole.sum() - view.sum(), total, msg=name)
        engine.broadcast_(view.mul_(engine.rank + 2), 0)
        torch.testing.assert_close(view.clone(), want * 2, msg=name)


def test_layouts_gathered(engine):
    for index, (name, view) in enumerate(layouts(engine.rank)):
        every = [list(layouts(r))[index][1] for r in range(engine.size)]
        want = torch.cat([each.reshape(1) if each.dim() == 0 else each for each in every])
        torch.testing.assert_close(engine.allgather(view), want.clone(), msg=name)


def test_asynchronous_keep_order_and_mix_with_blocking(engine):
    size, rank = engine.size, engine.rank
    tensors = [torch.full((50 + i,), float(rank + i)) for i in range(20)]
    works = [engine.allreduce_async_(t, what=f"t{i}") for i, t in enumerate(tensors)]
    blocking = engine.allreduce_(torch.tensor(rank + 1))
    assert blocking.item() == size * (size + 1) // 2
    for work in reversed(works):
        work.wait()
        work.wait()
    for i, tensor in enumerate(tensors):
        assert set(tensor.tolist()) == {size * (size - 1) / 2 + size * i}
    same = [torch.full((4,), float(rank + i)) for i in range(20)]
    for work in [engine.allreduce_async_(t, Op.AVERAGE) for t in same]:
        work.wait()
    assert [t[0].item() for t in same] == [(size - 1) / 2 + i for i in range(20)]


def test_asynchronous_on_what_needs_a_copy(engine):
    base = torch.zeros(4, 4, dtype=torch.bfloat16) + engine.rank
    work = engine.allreduce_async_(base[:, 1], Op.MAX)
    work.wait()
    assert base[:, 1].tolist() == [engine.size - 1.0] * 4
    assert base[:, 0].tolist() == [float(engine.rank)] * 4
    engine.allreduce_async_(torch.empty(0)).wait()


def test_small_chunks_give_the_same(engine, monkeypatch):
    monkeypatch.setattr(Engine, "chunk", 11)
    size, rank = engine.size, engine.rank
    for op in (Op.SUM, Op.AVERAGE, Op.MAX):
        close(engine.allreduce_(values(rank), op), expected(size, op))
        work_on = values(rank)
        engine.allreduce_async_(work_on, op).wait()
        close(work_on, expected(size, op))
        mine = expected(size, op).tensor_split(size)[rank]
        close(engine.reduce_scatter(values(rank), op), mine)
    close(engine.broadcast_(values(rank), size - 1), values(size - 1))
    short = torch.int16
    gathered = engine.allgather(values(rank, (rank + 1, 3), short))
    close(gathered, torch.cat([values(r, (r + 1, 3), short) for r in range(size)]))
    splits = [to + rank for to in range(size)]
    came, received = engine.alltoall(values(rank, (sum(splits), 2), short), splits)
    assert received == [rank + r for r in range(size)]
    sent = [values(r, (sum(to + r for to in range(size)), 2), short) for r in range(size)]
    want = [s.split([to + r for to in range(size)])[rank] for r, s in enumerate(sent)]
    close(came, torch.cat(want))


def test_chunks_are_counted(engine, monkeypatch):
    monkeypatch.setattr(Engine, "chunk", 5)
    calls = []
    inner = engine._allreduce
    monkeypatch.setattr(engine, "_allreduce", lambda f, *a: (calls.append(len(f)), inner(f, *a)))
    engine.allreduce_(torch.ones(12))
    assert calls == [5, 5, 2]


def test_a_buffer_of_the_engines_own(engine):
    for count in (0, 5, 70_001):
        buffer = engine.allocate(count, torch.float64)
        assert (buffer.shape, buffer.dtype) == ((count,), torch.float64)
        assert not buffer.any()
        for _ in range(2):
            buffer.copy_(values(engine.rank, (count,)))
            before = buffer._version
            engine.allreduce_(buffer)
            close(buffer, expected(engine.size, Op.SUM, (count,)))
            assert count == 0 or buffer._version > before
        part = buffer[: count // 2].copy_(values(engine.rank, (count // 2,)))
        engine.allreduce_(part, Op.MAX)
        close(part, expected(engine.size, Op.MAX, (count // 2,)))


def test_allgather_into_memory_that_is_there(engine):
    size, rank = engine.size, engine.rank
    for dtype in DTYPES:
        for shape in ((2, 3), (), (0, 2)):
            want = torch.cat([values(r, shape, dtype).reshape(-1) for r in range(size)])
            output = torch.zeros(want.numel(), dtype=dtype)
            before = output._version
            engine.allgather_into(output, values(rank, shape, dtype))
            close(output, want)
            assert output._version > before or not want.numel()
    for count in (3, 5000):
        output = torch.full((size, count), float(rank))
        engine.allgather_into(output, output[rank])  # in place, as FSDP does
        close(output, torch.arange(float(size))[:, None].expand(size, count).contiguous())
    strided = torch.zeros(size * 2, 6, dtype=torch.float64)[:, ::2]
    engine.allgather_into(strided, values(rank, (3, 2)).t())
    want = torch.cat([values(r, (3, 2)).t().reshape(-1) for r in range(size)])
    close(strided.reshape(-1), want)
    with pytest.raises(ConfigError, match="times as many elements of the same dtype"):
        engine.allgather_into(torch.zeros(2 * size + 1), torch.zeros(2))
    with pytest.raises(ConfigError, match="times as many elements of the same dtype"):
        engine.allgather_into(torch.zeros(2 * size, dtype=torch.float64), torch.zeros(2))


def test_a_foreign_tensor_in_pieces_through_shared_memory(engine, monkeypatch):
    monkeypatch.setattr("hpctrain.engines.node_buffers.SMALLEST_BYTES", 1)
    for op in (Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX):
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            if allowed(op, dtype):
                tensor = values(engine.rank, (3, 1001), dtype)
                engine.allreduce_(tensor, op)
                close(tensor, expected(engine.size, op, (3, 1001), dtype))
