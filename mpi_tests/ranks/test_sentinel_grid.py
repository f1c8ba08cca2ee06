"""The sentinel on a grid: what several ranks hold is compared among them, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hpctrain as hpc
from hpctrain.errors import DriftError
from mpi_tests.ranks.sharded_kit import adamw, batch, build, mse


def chain():
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()


def shape(world):
    """Two ranks along data where they can be, and the rest along another dimension."""
    return (2, world.size // 2) if world.size % 2 == 0 else (1, world.size)


def flip(tensor):
    with torch.no_grad():
        tensor.view(-1)[0] += 1e-12


def test_stages_are_compared_over_the_data_dimension(world):
    data, pipeline = shape(world)
    with hpc.Grid(world, data=data, pipeline=pipeline) as grid:
        stage = hpc.split(grid, chain(), stages="auto")
        replica = hpc.distribute(
            world, stage, torch.optim.AdamW(stage.parameters()), grid=grid, micro_batches=2
        )
        sentinel = hpc.Sentinel(world, stage, every=1)
        x = torch.ones(4, 4, dtype=torch.float64)
        replica.learn(mse, x, x)
        assert sentinel.step()
        if data > 1:
            assert set(sentinel.names) == {name for name, _ in chain().named_parameters()}
            odd = world.size - 1
            first = grid.placement.rank(grid.placement.coordinate(odd)._replace(data=0))
            name = world.comm.bcast(next(n for n, _ in stage.named_parameters()), root=odd)
            if world.rank == odd:
                flip(stage.get_parameter(name))
            told = rf"{name} of rank {odd} of {world.size} differs from that of rank {first}"
            with pytest.raises(DriftError, match=told):
                sentinel.step()
        sentinel.close()
        replica.close()


class Divided(nn.Module):
    """As `split(tensor=...)` leaves it: one parameter in parts, and one whole."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(3)
        parts = distribute_tensor(torch.randn(12, 2).double(), mesh, [Shard(0)])
        whole = distribute_tensor(torch.randn(3).double(), mesh, [Replicate()])
        self.parts, self.whole = nn.Parameter(parts), nn.Parameter(whole)


def test_parts_of_layers_over_data_and_whole_parameters_over_all(world):
    data, tensor = shape(world)
    with hpc.Grid(world, data=data, tensor=tensor) as grid:
        model = Divided(grid.mesh("tensor"))
        sentinel = hpc.Sentinel(world, model, every=1)
        assert sentinel.step()
        odd = world.size - 1
        place = grid.placement.coordinate(odd)
        if data > 1:
            if world.rank == odd:
                flip(model.parts.to_local())
            part = rf" \(tensor part {place.tensor + 1} of {tensor}\)" if tensor > 1 else ""
            first = grid.placement.rank(place._replace(data=0))
            told = f"parts{part} of rank {odd} of {world.size} differs from that of rank {first}"
            with pytest.raises(DriftError, match=told):
                sentinel.step()
            if world.rank == odd:
                with torch.no_grad():
                    model.parts.to_local().view(-1)[0] -= 1e-12
        if world.size > 1:
            if world.rank == odd:
                flip(model.whole.to_local())
            with pytest.raises(DriftError, match=f"whole of rank {odd} of {world.size} differs"):
                sentinel.compare(step=2)
        sentinel.close()
        excluded = hpc.Sentinel(world, model, every=1, exclude=["whole", "parts"])
        assert not excluded.names or world.size == 1
        excluded.close()


def test_shards_that_one_rank_holds_are_not_compared_and_it_says_so(world, capsys):
    with hpc.Grid(world) as grid:
        model = hpc.split(grid, nn.Linear(4, 4), shard="parameters")
        capsys.readouterr()
        sentinel = hpc.Sentinel(world, model, every=1)
        told = capsys.readouterr().err
        assert sentinel.step()
        if world.size > 1:
            assert not sentinel.names
            assert ("the sentinel compares nothing" in told) == (world.rank == 0)
        sentinel.close()


def test_divided_state_leaves_all_weights_to_be_compared(world):
    with hpc.Grid(world) as grid:
        model = hpc.split(grid, build(), shard="state")
        replica = hpc.distribute(world, model, adamw(model), grid=grid, bucket_bytes=256)
        sentinel = hpc.Sentinel(world, model, every=1)
        x, y = batch(1, 0)[0]
        replica.learn(mse, x, 0, y)
        assert sentinel.step()
        if world.size > 1:
            if world.rank == world.size - 1:
                flip(model.enter.weight)
            with pytest.raises(DriftError, match=r"enter.weight of rank"):
                sentinel.step()
        sentinel.close()
        replica.close()
