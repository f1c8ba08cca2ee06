"""Checkpoints on all ranks: complete or not there, whatever happens to them."""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import hpctrain as hpc
from hpctrain.checkpoint import Loaded, list_checkpoints, read_checkpoint, saving
from hpctrain.checkpoint.format import is_leftover
from hpctrain.checkpoint.writing import write_own_part
from hpctrain.errors import CheckpointError, ConfigError
from mpi_tests.checkpoints import bits, damage


@pytest.fixture
def directory(world, tmp_path):
    """A directory that all ranks see."""
    return world.comm.bcast(tmp_path / "checkpoints", root=0)


def make_state(step=0):
    generator = torch.Generator().manual_seed(step)
    model = {f"layer.{i}": torch.randn(40, 7 + i, generator=generator) for i in range(6)}
    model["turned"] = torch.randn(30, 20, generator=generator).t()
    model["nothing"] = torch.empty(0, 3)
    state = {
        i: {"step": torch.tensor(float(step)), "moment": value} for i, value in enumerate(model)
    }
    return {"model": model, "optimizer": {"state": state, "lr": (0.1, float("inf"))}, "step": step}


def own_of(world):
    return {"rng": torch.full((world.rank + 1,), world.rank), "rank": world.rank}


def writers_of(world, per_node):
    """How many ranks write if so many of each node may."""
    nodes = Counter(info.node_rank for info in world.ranks)
    return sum(min(per_node, count) for count in nodes.values())


def told(capfd, world):
    """Collective: what rank 0 has said."""
    return world.comm.bcast(capfd.readouterr().err, root=0)


@pytest.mark.parametrize("per_node", [None, 1, 3])
def test_what_is_saved_is_loaded(world, directory, per_node):
    state, other = make_state(3), make_state(4)
    store = hpc.Store(world, directory, writers_per_node=per_node)
    assert store.load() is None
    for step in (3, 4):
        given = state if step == 3 else other
        store.save(given, step=step, own=own_of(world), note={"n": step}, metrics={"loss": 0.5})
        given["model"]["layer.0"].fill_(step)  # training continues
        store.poll()
    path = store.wait()
    assert store.failed is None
    assert not store.is_saving
    loaded = store.load(like={"model": make_state()["model"]})
    assert isinstance(loaded, Loaded)
    assert bits(loaded.state) == bits(make_state(4))
    assert bits(loaded.own) == bits(own_of(world))
    assert (loaded.step, loaded.note, loaded.metrics) == (4, {"n": 4}, {"loss": 0.5})
    assert loaded.path == path == store.wait()
    earlier = store.load(list_checkpoints(directory)[0].path)
    assert bits(earlier.state) == bits(make_state(3))
    assert bits(read_checkpoint(path)) == bits(make_state(4))
    parts = len(list(path.glob("*.safetensors")))
    assert parts == (1 if per_node is None else writers_of(world, per_node))
    assert store.list() == list_checkpoints(directory)
    assert sorted(p.name for p in directory.iterdir()) == [
        e.path.name for e in list_checkpoints(directory)
    ]
    store.close()
    with pytest.raises(CheckpointError, match="closed"):
        store.save(state, step=5)


def test_another_number_of_ranks(world, directory):
    """Written by some of the ranks, read by all, and the other way round."""
    some_ranks = world.comm.Split(0 if world.rank < max(1, world.size - 1) else 1, world.rank)
    for name, writers, readers in (("few", True, False), ("many", False, True)):
        for is_some, save in ((writers, True), (readers, False)):
            with contextlib.ExitStack() as stack:
                group = world
                if is_some:
                    group = stack.enter_context(
                        hpc.init(seed=7, comm=some_ranks, device="cpu", num_threads=1)
                    )
                if not is_some or world.rank < max(1, world.size - 1):
                    store = hpc.Store(group, directory / name, writers_per_node=2)
                    if save:
                        store.save(make_state(1), step=1, own=own_of(group), wait=True)
                    loaded = store.load()
                    assert bits(loaded.state) == bits(make_state(1))
                    same = loaded.num_ranks == group.size
                    assert bits(loaded.own) == bits(own_of(group) if same else None)
                    store.close()
            world.comm.Barrier()
    some_ranks.Free()


@pytest.mark.parametrize("kind", ["truncated", "flipped", "longer", "missing"])
def test_damaged_ones_are_refused_by_name(world, directory, kind, capfd):
    store = hpc.Store(world, directory / "all", writers_per_node=2)
    store.save(make_state(1), step=1, own=own_of(world), wait=True)
    store.save(make_state(2), step=2, own=own_of(world), wait=True)
    newest = store.wait()
    names = sorted(p.name for p in newest.iterdir() if p.name != "owner.json")
    assert len(names) == 2 + writers_of(world, 2)
    world.comm.Barrier()
    for name in names:
        if world.rank == 0:
            shutil.copytree(newest, directory / "copy")
            damage(kind, newest / name)
        told(capfd, world)
        loaded = store.load()
        assert loaded.step == 1
        assert bits(loaded.state) == bits(make_state(1))
        words = told(capfd, world)
        assert f"checkpoint {newest} is refused" in words
        assert name in words
        with pytest.raises(CheckpointError, match=name):
            store.load(newest)
        world.comm.Barrier()
        if world.rank == 0:
            shutil.rmtree(newest)
            (directory / "copy").rename(newest)
        world.comm.Barrier()
    assert store.load().step == 2
    if world.rank == 0:
        for entry in list_checkpoints(store.directory):
            damage(kind, entry.path / "tree.json")
    world.comm.Barrier()
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        store.load()
    store.close()


def test_another_model_is_refused(world, directory, capfd):
    store = hpc.Store(world, directory)
    store.save(make_state(1), step=1, wait=True)
    wider = make_state(2)
    wider["model"]["layer.0"] = torch.ones(3, 3)
    store.save(wider, step=2, wait=True)
    like = {"model": make_state()["model"]}
    assert store.load(like=like).step == 1
    assert "layer.0 is 3x3 in it and 40x7 here" in told(capfd, world)
    with pytest.raises(CheckpointError, match=r"layer\.1x 1 is missing"):
        store.load(like={"model": {**like["model"], "layer.1x": torch.ones(1)}})
    store.close()


@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_full_disk_is_an_error_on_all_ranks(world, directory, victim):
    """The limit on the size of files stands for a disk that takes no more."""
    rank = 0 if victim == "first" else world.size - 1
    store = hpc.Store(world, directory, writers_per_node=world.size)
    big = {f"w{i}": torch.full((50_000,), float(i)) for i in range(2 * world.size)}
    store.save(big, step=1, wait=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if world.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        store.save(big, step=2)
        with pytest.raises(CheckpointError, match=f"rank.*{rank}.*could not be written.*large"):
            store.wait()
        store.save(big, step=3)
        task = store._saving.task
        task.outcome(30)
        if world.rank == rank:
            with pytest.raises(CheckpointError, match="could not be written"):
                store.poll()
        world.comm.Barrier()
        with pytest.raises(CheckpointError, match="could not be written"):
            store.save(big, step=4)  # the one before it is not forgotten
    finally:
        if world.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.load().step == 1
    store.save(big, step=5, wait=True)
    assert store.load().step == 5
    store.close()
    world.comm.Barrier()
    assert not [p for p in directory.iterdir() if is_leftover(p)]


def test_what_differs_between_ranks_is_named(world, directory):
    store = hpc.Store(world, directory)
    with pytest.raises(CheckpointError, match=r"rank 0.*state\['a'\] is of type object"):
        store.save({"a": object() if world.rank == 0 else 1}, step=1)
    if world.size > 1:
        for wrong, what in (
            ({"state": {"lr": world.rank}}, r"state\['lr'\] is 1 and on rank 0 0"),
            ({"state": {"x": torch.ones(1 + world.rank)}}, r"state\['x'\] is .*\(2,\).*\(1,\)"),
            ({"state": {"mean": torch.full((9,), world.rank)}}, "tensor mean has different values"),
            ({"state": 1, "step": world.rank}, "step is 1 and on rank 0 0"),
            ({"state": 1, "own": None if world.rank else 1}, "own is given"),
            ({"state": {"b": 1} if world.rank else {}}, r"state\['b'\] is not on|state is not"),
        ):
            with pytest.raises(CheckpointError, match=what):
                store.save(**{"step": 1, **wrong})
        turned = {"a": 1, "b": 2} if world.rank else {"b": 2, "a": 1}
        store.save(turned, step=1, wait=True)  # the order is rank 0's
        assert list(store.load().state) == ["b", "a"]
    world.comm.Barrier()
    assert not [p for p in directory.iterdir() if is_leftover(p)]
    for wrong in ({"writers_per_node": 0}, {"timeout_s": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            hpc.Store(world, directory, **wrong)
    if world.size > 1:
        with pytest.raises(ConfigError, match=r"rank 1.*is opened here and"):
            hpc.Store(world, directory / ("a" if world.rank == 1 else "b"))
    store.close()


def test_retention_and_leftovers(world, directory):
    if world.rank == 0:
        left = directory / ".partial-checkpoint-000007-step-9.0a"
        left.mkdir(parents=True)
        (left / "owner.json").write_text(
            f'{{"host": "{socket.gethostname()}", "process": 999999999, '
            '"started": 1.0, "job": null}'
        )
        (directory / ".trash-checkpoint-000003-step-1.0b").mkdir()
    world.comm.Barrier()
    keep = hpc.Keep(last=2, best="min:loss")
    store = hpc.Store(world, directory, keep=keep, asynchronous=False)
    assert [p.name for p in directory.iterdir()] == []
    world.comm.Barrier()
    for step, loss in enumerate([0.9, 0.1, 0.5, 0.3, 0.4]):
        store.save({"x": torch.ones(3)}, step=step, metrics={"loss": loss})
    world.comm.Barrier()
    assert [entry.step for entry in list_checkpoints(directory)] == [1, 3, 4]
    store.close()


def test_a_store_is_finished_when_its_world_ends(world, directory):
    with hpc.init(seed=7, comm=world.comm, device="cpu", num_threads=1) as inner:
        store = hpc.Store(inner, directory)
        store.save(make_state(1), step=1)
    assert [entry.step for entry in list_checkpoints(Path(directory))] == [1]
    assert not store.is_saving


def test_a_second_store_of_the_process_waits_for_what_the_first_still_writes(
    world, directory, monkeypatch
):
    """A training that failed while it saved is begun again in the same process."""

    def write_slowly(*args, **kwargs):
        time.sleep(0.5)
        return write_own_part(*args, **kwargs)

    first = hpc.Store(world, directory)
    monkeypatch.setattr(saving, "write_own_part", write_slowly)
    first.save(make_state(3), step=3)
    second = hpc.Store(world, directory)
    assert second.load().step == 3
    second.save(make_state(4), step=4, wait=True)
    assert [entry.step for entry in list_checkpoints(directory)] == [3, 4]
    for store in (first, second):
        store.close()
