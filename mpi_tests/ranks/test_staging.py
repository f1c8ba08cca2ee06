"""Sharded models gather and reduce in the memory that the ranks of a node share."""

from __future__ import annotations

import pytest
import torch

import hpctrain as hpc
from hpctrain.errors import CollectiveError
from hpctrain.sharding import sharding_of
from hpctrain.torch_backend import NodeStaging
from mpi_tests.ranks.sharded_kit import adamw, assert_equal, build, train, train_alone


@pytest.fixture(scope="module")
def grid(world):
    with hpc.Grid(world) as made:
        yield made


def count_messages(group, monkeypatch):
    """How often shards are sent from here on."""
    sent = []
    for name in ("all_gather_single", "reduce_scatter_single"):
        whole = getattr(group, name)
        monkeypatch.setattr(group, name, lambda *a, w=whole, n=name: (sent.append(n), w(*a))[1])
    return sent


def trained(world, grid, monkeypatch, change=None, kind="parameters"):
    """What was sent while a model trained, which must equal one process; and how it was staged."""
    model = hpc.split(grid, build(), shard=kind)
    if change is not None:
        change(model)
    replica = hpc.distribute(world, model, adamw(model), grid=grid)
    with monkeypatch.context() as patch:
        sent = count_messages(grid.mesh("data").get_group(), patch)
        train(world, replica)
    assert_equal(model, train_alone(world.size))
    replica.close()
    return sent, sharding_of(model).staging


@pytest.mark.parametrize("kind", ["gradients", "parameters"])
def test_nothing_is_sent_on_one_node(world, grid, kind, monkeypatch):
    sent, staging = trained(world, grid, monkeypatch, kind=kind)
    assert sent == []
    assert (staging is None) == (world.size == 1)
    assert staging is None or staging.why_not is None


def test_several_gathers_under_way_go_by_message(world, grid, monkeypatch):
    """Explicit prefetching gathers a unit before the last one was copied out everywhere."""

    def prefetch(model):
        units = list(model.blocks)
        model.set_modules_to_forward_prefetch(units)
        units[-1].set_modules_to_backward_prefetch([*reversed(units[:-1]), model])

    sent, _ = trained(world, grid, monkeypatch, prefetch)
    assert ("all_gather_single" in sent) == (world.size > 1)
    assert "reduce_scatter_single" not in sent


def test_units_that_are_too_large_go_by_message(world, grid, monkeypatch):
    monkeypatch.setattr("hpctrain.torch_backend.staging._MOST_BYTES", 0)
    sent, _ = trained(world, grid, monkeypatch)
    both = {"all_gather_single", "reduce_scatter_single"}
    assert set(sent) == (both if world.size > 1 else set())


def test_turned_off_everything_goes_by_message(world, grid, monkeypatch):
    def turn_off(model):
        staging = sharding_of(model).staging
        if staging is not None:
            staging.turn_off("for a test")

    sent, _ = trained(world, grid, monkeypatch, turn_off)
    assert bool(sent) == (world.size > 1)


def test_ranks_that_gather_different_units_are_refused(world, grid):
    if world.size == 1:
        pytest.skip("one rank cannot differ")
    group = grid.mesh("data").get_group()
    staging = NodeStaging(group, gathered=[4096], reduced=[4096], is_clear=lambda: True)
    size = (world.size * (2 + (world.rank == 1)),)
    output = staging.all_gather.allocate(size, dtype=torch.float64, device=torch.device("cpu"))
    own = output.chunk(world.size)[world.rank]
    with pytest.raises(CollectiveError, match=r"rank 1 calls all_gather_single float64 \(3,\)"):
        staging.all_gather(output, own, group)


def test_a_reduction_averages_what_all_ranks_give(world, grid):
    if world.size == 1:
        pytest.skip("torch copies")
    group = grid.mesh("data").get_group()
    staging = NodeStaging(group, gathered=[0], reduced=[1 << 20], is_clear=lambda: True)
    for turn in range(4):
        for op in (torch.distributed.ReduceOp.AVG, torch.distributed.ReduceOp.SUM):
            count = 70_000 + turn
            options = {"dtype": torch.float32, "device": torch.device("cpu")}
            given = staging.reduce_scatter.allocate((world.size * count,), **options)
            output = staging.reduce_scatter.allocate((count,), **options)
            given.copy_(torch.arange(world.size * count) * (world.rank + 1.0 + turn))
            staging.reduce_scatter(output, given, group, op)
            place = torch.arange(world.size * count).chunk(world.size)[world.rank]
            factor = sum(rank + 1.0 + turn for rank in range(world.size))
            if op is torch.distributed.ReduceOp.AVG:
                factor /= world.size
            torch.testing.assert_close(output, place * factor)
