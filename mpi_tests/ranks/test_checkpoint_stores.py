"""The store is a seam: another one, and parts whose state is sharded, under a Saver."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hpctrain as hpc
from hpctrain.checkpoint import (
    Region,
    find_checkpoint,
    list_checkpoints,
    load_weights,
    read_checkpoint,
    verify,
)
from hpctrain.errors import ConfigError
from mpi_tests.checkpoints import bits
from mpi_tests.plain_store import install
from mpi_tests.sharding import bounds, by_rows


@pytest.fixture
def folder(world, tmp_path):
    return world.comm.bcast(tmp_path, root=0)


class Shard:
    """A part that holds some rows of a table; its second tensor appears with the first step."""

    def __init__(self, world, value):
        self.world = world
        self.table = torch.arange(35.0).view(7, 5) + value
        self.moment = self.table * 2 if value else None
        self.loaded = {}

    def state_dict(self):
        state = {"table": by_rows(self.table, self.world.rank, self.world.size)}
        if self.moment is not None:
            state["moment"] = by_rows(self.moment, self.world.rank, self.world.size)
        return state

    def load_state_dict(self, state):
        self.loaded = state

    def piece_of(self, place, shape):
        start, stop = bounds(shape[0], self.world.rank, self.world.size)
        return Region((start, 0), (stop - start, shape[1]))


def run_of(world, directory, *, value=0, **options):
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(float(value))
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 0.1))
    shard = Shard(world, value)
    saver = hpc.Saver(
        world, directory, replica, named={"shard": shard}, every_s=None, signals=(), **options
    )
    return saver, replica, shard


def test_a_sharded_part_gets_its_pieces_back(world, folder):
    saver, replica, shard = run_of(world, folder / "run", value=3)
    saver.save(wait=True)
    saver.close()
    replica.close()
    again, replica, other = run_of(world, folder / "run")
    assert again.restore() is not None
    for name in ("table", "moment"):
        piece = other.loaded[name]
        assert piece.shape == (7, 5)
        assert bits(piece.tensor) == bits(shard.state_dict()[name].tensor)
        assert piece.offset == shard.state_dict()[name].offset
    again.close()
    replica.close()
    whole = read_checkpoint(find_checkpoint(folder / "run"))
    assert bits(whole["shard"]["table"]) == bits(shard.table)


def test_a_store_of_another_package(world, folder, monkeypatch):
    if world.rank == 0:
        install(folder / "site")
    world.comm.Barrier()
    monkeypatch.syspath_prepend(str(folder / "site"))
    directory = folder / "run"

    class Counter:
        count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    model = nn.Linear(3, 2)
    replica = hpc.distribute(world, model, torch.optim.SGD(model.parameters(), 0.1))
    counter = Counter()

    def saver_of():
        return hpc.Saver(
            world,
            directory,
            replica,
            named={"counter": counter},
            every_s=None,
            signals=(),
            store="plain",
        )

    saver = saver_of()
    assert saver.restore() is None
    counter.count = 5
    saver.boundary()
    saver.save(wait=True)
    weights = model.weight.detach().clone()
    saver.close()
    with torch.no_grad():
        model.weight.zero_()
    counter.count = 0
    saver = saver_of()
    restored = saver.restore()
    assert (restored.step, counter.count) == (1, 5)
    assert torch.equal(model.weight, weights)
    saver.close()
    replica.close()
    (entry,) = list_checkpoints(directory)
    assert entry.path == find_checkpoint(directory) == find_checkpoint(entry.path)
    assert verify(entry.path) == []
    assert torch.equal(load_weights(directory)["weight"], weights)
    with pytest.raises(
        ConfigError,
        match=r"not an installed checkpoint store; .*: hpctrain, "
        r"plain",
    ):
        hpc.Saver(world, directory, replica, store="other")
