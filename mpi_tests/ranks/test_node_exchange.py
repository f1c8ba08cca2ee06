"""Allgather and reduce-scatter of large tensors through a node's memory, at any n."""

from __future__ import annotations

import pytest
import torch

from hpctrain.engines import Op, create
from hpctrain.errors import CollectiveError
from mpi_tests.ranks.engines_kit import allowed, close, expected, values


@pytest.fixture
def small_pieces(world, monkeypatch):
    """An engine of its own whose pieces are so small that tensors take many turns."""
    monkeypatch.setattr("hpctrain.engines.node_buffers.SMALLEST_BYTES", 1)
    monkeypatch.setattr("hpctrain.engines.node_buffers.PIECE_BYTES", 16384)
    engine = create(world, "mpi")
    yield engine
    engine.close()


def test_large_tensors_are_gathered_and_scattered_turn_by_turn(world, small_pieces):
    engine = small_pieces
    size, rank = engine.size, engine.rank
    for rows in (lambda r: 700, lambda r: 300 * r, lambda r: 5000 if r == 0 else 1):
        parts = [values(r, (rows(r), 3)) for r in range(size)]
        close(engine.allgather(parts[rank]), torch.cat(parts))
    output = torch.empty(size * 2100, dtype=torch.float64)
    engine.allgather_into(output, values(rank, (700, 3)))
    close(output, torch.cat([values(r, (700, 3)).reshape(-1) for r in range(size)]))
    output = output.view(size, -1).fill_(rank)
    engine.allgather_into(output, output[rank])  # in place
    assert (output == torch.arange(size)[:, None]).all()
    for op in (Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX):
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int16):
            if allowed(op, dtype):
                for num_rows in (size * 70 + 1, 1):
                    shape = (num_rows, 31)
                    part = engine.reduce_scatter(values(rank, shape, dtype), op)
                    close(part, expected(size, op, shape, dtype).tensor_split(size)[rank])


def test_a_turn_takes_one_barrier(world, small_pieces, monkeypatch):
    engine = small_pieces
    if world.size == 1 or world.num_nodes > 1:
        return
    engine.allgather(torch.zeros(1))  # makes the group
    barrier, waits = engine.node_group().barrier, []
    plain = barrier.wait
    monkeypatch.setattr(barrier, "wait", lambda: (waits.append(1), plain()))
    engine.allgather(torch.zeros(5 * 8192, dtype=torch.uint8))
    assert len(waits) == 1 + 5
    engine.reduce_scatter(torch.zeros(world.size * 3 * (2048 // world.size)))
    assert len(waits) == 6 + 1 + 3


def test_ranks_in_different_collectives_are_refused(world, small_pieces):
    if world.size == 1 or world.num_nodes > 1:
        return
    engine = small_pieces
    last = world.size - 1
    one = torch.zeros(1)
    into = torch.zeros(world.size)
    call = engine.allreduce_ if world.rank < last else lambda x: engine.allgather_into(into, x)
    told = rf"another tensor on .*allgather on local rank {last}"
    with pytest.raises(CollectiveError, match=told):
        call(one)
