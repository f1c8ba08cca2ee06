"""Loader, random streams, metrics and Saver follow a grid's data coordinate, at any n."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset

import hpctrain as hpc
from hpctrain import metrics
from hpctrain.errors import ConfigError
from hpctrain.grid import factorings

NUM = 23  # divides by nothing


def make_grid(world, shape):
    sizes = {"data": shape.data, "pipeline": shape.pipeline, "tensor": shape.tensor}
    return hpc.Grid(world, timeout_s=60, **sizes)


@pytest.fixture(scope="module")
def grids(world):
    """Every grid of these ranks, the one of data alone first."""
    made = [make_grid(world, shape) for shape in factorings(world.size)]
    yield made
    for grid in made:
        grid.close()
    assert world.streams.place == (world.rank, 0)


def handed_out(world, grid, loader):
    """By data coordinate: the samples of each batch, which must be equal on its ranks."""
    mine = [batch.tolist() for batch in loader]
    told = world.comm.allgather((grid.coordinate.data, mine))
    by_coordinate = {}
    for at, batches in told:
        assert by_coordinate.setdefault(at, batches) == batches
    return by_coordinate


def test_every_sample_once_over_the_data_dimension(world, grids):
    alone = None
    for grid in grids:
        loader = hpc.Loader(world, torch.arange(NUM), global_batch=8, grid=grid)
        parts = handed_out(world, grid, loader)
        assert sorted(parts) == list(range(grid.data))
        flat = [sample for batches in parts.values() for batch in batches for sample in batch]
        assert sorted(flat) == list(range(NUM))
        assert loader.total == NUM
        steps = [
            sorted(s for part in step for s in part) for step in zip(*parts.values(), strict=True)
        ]
        assert alone in (None, steps)  # batches do not depend on the grid
        alone = steps


def test_a_run_resumes_on_another_grid(world, grids):
    grid = grids[0]
    loader = hpc.Loader(world, torch.arange(NUM), global_batch=8, grid=grid)
    first = next(iter(loader)).tolist()
    state = loader.state_dict()
    seen = {s for at, part in world.comm.allgather((grid.coordinate.data, first)) for s in part}
    assert len(seen) == 8
    for grid in grids[1:]:
        loader = hpc.Loader(world, torch.arange(NUM), global_batch=8, grid=grid)
        loader.load_state_dict(state)
        parts = handed_out(world, grid, loader)
        rest = [s for batches in parts.values() for batch in batches for s in batch]
        assert sorted([*seen, *rest]) == list(range(NUM))
        assert loader.total == NUM


class Counting(IterableDataset):
    """A stream, or a part of one."""

    def __init__(self, start=0, step=1):
        self.numbers = range(start, NUM, step)

    def __iter__(self):
        return iter(self.numbers)


def test_streams_follow_the_data_coordinate(world, grids):
    for grid in grids:
        own = Counting(grid.coordinate.data, grid.data)
        for data, split in ((Counting(), None), (own, "already")):
            loader = hpc.Loader(world, data, global_batch=8, split=split, grid=grid)
            parts = handed_out(world, grid, loader)
            flat = [s for batches in parts.values() for batch in batches for s in batch]
            assert set(flat) == set(range(NUM))
            assert loader.total == NUM


def test_scattered_shares_are_refused_where_ranks_need_the_same(world, grids):
    shard = hpc.scatter(world, torch.arange(NUM) if world.is_main else None)
    for grid in grids:
        if grid.data == world.size:
            hpc.Loader(world, shard, global_batch=8, grid=grid)
            continue
        with pytest.raises(ConfigError, match="several ranks need the same samples"):
            hpc.Loader(world, shard, global_batch=8, grid=grid)


def test_random_numbers_are_equal_within_a_data_coordinate(world, grids):
    for shape in (factorings(world.size)[0], factorings(world.size)[-1]):
        grid = make_grid(world, shape)
        world.streams.bind_own()
        mask = torch.nn.functional.dropout(torch.ones(64), 0.5)
        told = world.comm.allgather((grid.coordinate, mask.tolist()))
        by_place = {}
        for at, drawn in told:
            assert by_place.setdefault((at.data, at.pipeline), drawn) == drawn
        drawn = [tuple(values) for values in by_place.values()]
        assert len(set(drawn)) == len(drawn)
        grid.close()
    world.streams.bind_own()


def test_metrics_count_each_sample_once(world, grids):
    for grid in grids:
        loader = hpc.Loader(world, torch.arange(NUM), global_batch=8, grid=grid)
        total, mean, right = metrics.Sum(), metrics.Mean(), metrics.Confusion(2)
        for batch in loader:
            if grid.coordinate.pipeline < grid.pipeline - 1:
                continue  # only the last stage has outputs
            total.update(batch)
            mean.update(batch.double())
            right.update(batch % 2, torch.ones_like(batch))
        assert total.value(grid) == sum(range(NUM))
        assert mean.value(grid) == sum(range(NUM)) / NUM
        assert right.value(grid).num_samples == NUM
        assert metrics.total(grid, len(grid.ranks("data"))) == grid.data**2


def test_a_saver_restores_randomness_on_the_same_grid_alone(world, tmp_path_factory):
    path = world.comm.bcast(str(tmp_path_factory.mktemp("runs")) if world.is_main else None)
    shapes = factorings(world.size)

    def run(shape):
        with make_grid(world, shape) as grid:
            world.streams.bind_equal()
            loader = hpc.Loader(world, torch.arange(NUM), global_batch=8, grid=grid)
            saver = hpc.Saver(world, path, loader, named={"net": torch.nn.Linear(2, 2)})
            if saver.restore() is None:
                torch.rand(5)
                saver.save()
            told = world.comm.allgather((grid.coordinate, torch.rand(1).item()))
            saver.close()
            for at, drawn in told:
                if at[:2] == grid.coordinate[:2]:
                    assert drawn == told[world.rank][1]
            return told[world.rank][1]

    first = run(shapes[0])
    assert run(shapes[0]) == first
    if world.size > 1:
        assert all(world.comm.allgather(run(shapes[-1]) != first))
    world.streams.bind_own()
