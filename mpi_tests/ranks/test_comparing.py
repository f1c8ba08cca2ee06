"""Collectives whose values go along with the comparison of calls, and those that are too large."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hpctrain as hpc
from hpctrain.errors import CollectiveError
from hpctrain.torch_backend.comparing import room_for

SMALL, LARGE = 3, 5000
SIZES = pytest.mark.parametrize("count", [SMALL, LARGE])
DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def group(world):
    with hpc.Grid(world) as made:
        yield made.mesh("data").get_group()


def test_sizes_are_on_both_sides(world):
    assert SMALL * world.size * 8 <= room_for(world.size) < LARGE


@SIZES
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(world, group, count, dtype):
    given = torch.arange(count) % 7 + world.rank
    tensor = given.to(dtype)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(
        tensor, sum(torch.arange(count) % 7 + r for r in range(world.size)).to(dtype)
    )


@SIZES
def test_averages_and_largest(world, group, count):
    tensor = torch.full((count,), float(world.rank))
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    torch.testing.assert_close(tensor, torch.full((count,), (world.size - 1) / 2))
    tensor = torch.full((count,), world.rank)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    assert tensor.unique().tolist() == [world.size - 1]


@SIZES
def test_a_view_with_gaps_is_written_where_it_lies(world, group, count):
    whole = torch.zeros(count, 2)
    column = whole[:, 1]
    column += world.rank + 1
    version = whole._version
    dist.all_reduce(column, group=group)
    assert whole[:, 0].count_nonzero() == 0
    assert whole[:, 1].unique().tolist() == [sum(range(1, world.size + 1))]
    assert whole._version > version


@SIZES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.complex64, torch.bfloat16])
def test_gathers_and_broadcasts(world, group, count, dtype):
    own = ((torch.arange(count) + world.rank) % 2).to(dtype)
    output = torch.empty(world.size, count, dtype=dtype)
    group.all_gather_single(output, own).wait()
    expected = torch.stack([(torch.arange(count) + r) % 2 for r in range(world.size)]).to(dtype)
    assert torch.equal(output, expected)
    dist.broadcast(own, world.size - 1, group=group)
    assert torch.equal(own, expected[-1])


@SIZES
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
def test_reductions_in_shares(world, group, count, op):
    given = torch.arange(world.size * count, dtype=torch.float64) * (world.rank + 1)
    output = torch.empty(count, dtype=torch.float64)
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    group.reduce_scatter_single(output, given, options).wait()
    place = torch.arange(world.size * count, dtype=torch.float64).chunk(world.size)[world.rank]
    factor = world.size * (world.size + 1) / 2 / (world.size if op == dist.ReduceOp.AVG else 1)
    torch.testing.assert_close(output, place * factor)


def test_a_small_tensor_on_one_rank_and_a_large_one_on_another_are_refused(world, group):
    if world.size == 1:
        pytest.skip("one rank cannot differ")
    before = torch.full((SMALL if world.rank == 1 else LARGE,), 1.0)
    tensor = before.clone()
    with pytest.raises(CollectiveError, match=rf"rank 1 calls all_reduce SUM float32 \({SMALL},\)"):
        dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, before)
    dist.all_reduce(tensor := torch.ones(1), group=group)
    assert tensor.item() == world.size
