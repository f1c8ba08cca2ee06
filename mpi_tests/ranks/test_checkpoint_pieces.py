"""Checkpoints of state that is not whole on any rank."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch

import hpctrain as hpc
from hpctrain.checkpoint import Piece, Region, list_checkpoints, read_checkpoint, verify
from hpctrain.errors import CheckpointError
from mpi_tests.checkpoints import bits, damage
from mpi_tests.sharding import by_columns, by_rows, cut_state, join, whole_state


@pytest.fixture
def directory(world, tmp_path):
    """A directory that all ranks see."""
    return world.comm.bcast(tmp_path / "checkpoints", root=0)


def state_of(world, step=0):
    """Pieces, a whole tensor, and plain values."""
    return {
        "pieces": cut_state(whole_state(step), world.rank, world.size),
        "whole": torch.full((5,), float(step)),
        "step": step,
    }


@pytest.mark.parametrize("per_node", [None, 1, 3])
def test_pieces_are_written_once_and_loaded_as_anything(world, directory, per_node):
    store = hpc.Store(world, directory, writers_per_node=per_node)
    for step in (1, 2):
        given = state_of(world, step)
        store.save(given, step=step, own={"rank": world.rank})
        for tensors in given["pieces"].values():
            for piece in tensors.values():
                piece.tensor.fill_(7)  # training continues
    path = store.wait()
    expected = {"pieces": whole_state(2), "whole": torch.full((5,), 2.0), "step": 2}
    assert verify(path) == []
    assert bits(read_checkpoint(path)) == bits(expected)
    loaded = store.load()
    assert bits(loaded.state) == bits(expected)
    assert loaded.own == {"rank": world.rank}
    for turn in range(4):  # each way of cutting from each other
        like = cut_state(whole_state(), world.rank, world.size, turn)
        loaded = store.load(like={"pieces": like})
        wanted = cut_state(whole_state(2), world.rank, world.size, turn)
        assert bits(join(loaded.state["pieces"])) == bits(join(wanted))
        assert bits(loaded.state["whole"]) == bits(expected["whole"])
        assert loaded.own == {"rank": world.rank}
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    numbers = sum(
        t.numel() * t.element_size() for ts in whole_state().values() for t in ts.values()
    )
    assert stored < numbers + 20_000 * len(list(path.glob("*.safetensors")))
    keys = [key for file in path.glob("*.safetensors") for key in _keys(file)]
    assert len(set(keys)) == len(keys)
    store.close()


def _keys(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        return list(opened.keys())


def test_a_function_says_which_pieces_are_wanted(world, directory):
    """For state that is not there yet, such as an optimizer's."""
    store = hpc.Store(world, directory)
    store.save({"optimizer": whole_state(3)["rows"], "other": torch.ones(4)}, step=3, wait=True)
    asked = {}

    def cut(place, shape):
        asked[place] = shape
        if place == "weight":
            piece = by_columns(torch.empty(shape), world.rank, world.size)
            return Region(piece.offset, tuple(piece.tensor.shape))
        return range(world.rank, world.rank + 1) if place == "few" else None

    state = store.load(like={"optimizer": cut}).state
    whole = whole_state(3)["rows"]
    assert asked == {name: tuple(tensor.shape) for name, tensor in whole.items()}
    weight = by_columns(whole["weight"], world.rank, world.size)
    assert bits(join(state["optimizer"]["weight"])) == bits(join(weight))
    few = whole["few"].reshape(-1)[world.rank : world.rank + 1]
    assert bits(join(state["optimizer"]["few"])) == bits((world.rank, (2, 3), few))
    assert bits(state["optimizer"]["half"]) == bits(whole["half"])
    assert bits(state["other"]) == bits(torch.ones(4))
    with pytest.raises(CheckpointError, match=r"\[5:9, 0:5\] of optimizer/weight was asked"):
        store.load(like={"optimizer": lambda place, shape: Region((5, 0), (4, 5))})
    store.close()


def test_another_number_of_ranks(world, directory):
    """Written by some of the ranks, read by all, and the other way round."""
    is_in = world.rank < max(1, world.size - 1)
    some_ranks = world.comm.Split(0 if is_in else 1, world.rank)
    for name, few_write in (("few", True), ("many", False)):
        for few, save in ((few_write, True), (not few_write, False)):
            with contextlib.ExitStack() as stack:
                group = world
                if few:
                    group = stack.enter_context(
                        hpc.init(seed=7, comm=some_ranks, device="cpu", num_threads=1)
                    )
                if not few or is_in:
                    store = hpc.Store(group, directory / name, writers_per_node=2)
                    if save:
                        store.save(state_of(group, 1), step=1, wait=True)
                    like = {"pieces": state_of(group)["pieces"]}
                    loaded = store.load(like=like)
                    assert bits(join(loaded.state)) == bits(join(state_of(group, 1)))
                    store.close()
            world.comm.Barrier()
    some_ranks.Free()


def test_wrong_pieces_are_refused_on_all_ranks(world, directory):
    store = hpc.Store(world, directory)
    last = world.size - 1

    def piece(start, stop, total):
        return Piece(torch.arange(float(start), stop), (start,), (total,))

    r, n = world.rank, world.size
    wrong = [
        (piece(r, r + 1, n + 1), rf"tensor a: only {n} of {n + 1} elements"),
        (piece(r, r + 2 if r == last else r + 1, n), r"rank .*a.*must lie inside"),
    ]
    if n > 1:
        wrong += [
            (piece(r, min(r + 2, n), n), "tensor a: rank 0 holds .*overlap in part"),
            (torch.ones(1) if r else piece(0, 1, 1), "differs between ranks"),
            (piece(0, 1, 1 + (r == last)), r"differs between ranks.*\(2,\) in pieces"),
            (Piece(torch.full((3,), float(r)), (0,), (3,)), r"hold \[0:3\], with different values"),
        ]
    for given, text in wrong:
        with pytest.raises(CheckpointError, match=text):
            store.save({"a": given}, step=1)
    with pytest.raises(CheckpointError, match="piece of a tensor"):
        store.save({}, step=1, own={"a": piece(0, 1, 1)})
    assert store.load() is None
    store.save({"a": piece(r, r + 1, n)}, step=1, wait=True)
    with pytest.raises(CheckpointError, match=f"its a belongs .* is {n} in it and {n + 1} here"):
        store.load(like={"a": piece(r, r + 1, n + 1)})
    store.close()


@pytest.mark.parametrize("kind", ["truncated", "flipped", "longer", "missing"])
def test_damaged_ones_are_refused_and_the_one_before_is_resharded(world, directory, kind):
    keep = hpc.Keep(last=2)
    store = hpc.Store(world, directory, keep=keep, writers_per_node=2)
    for step in (1, 2, 3):
        store.save(state_of(world, step), step=step, own={"rank": world.rank}, wait=True)
    world.comm.Barrier()
    assert [entry.step for entry in list_checkpoints(directory)] == [2, 3]
    newest = list_checkpoints(directory)[-1].path
    names = sorted(path.name for path in newest.iterdir() if path.name != "owner.json")
    like = {"pieces": cut_state(whole_state(), world.rank, world.size, 1)}
    wanted = cut_state(whole_state(2), world.rank, world.size, 1)
    for name in names:
        world.comm.Barrier()
        if world.rank == 0:
            shutil.copytree(newest, directory / "copy")
            damage(kind, newest / name)
        world.comm.Barrier()
        loaded = store.load(like=like)
        assert loaded.step == 2
        assert bits(join(loaded.state["pieces"])) == bits(join(wanted))
        with pytest.raises(CheckpointError, match=name):
            store.load(newest, like=like)
        world.comm.Barrier()
        if world.rank == 0:
            shutil.rmtree(newest)
            (directory / "copy").rename(newest)
    world.comm.Barrier()
    assert store.load(like=like).step == 3
    store.close()


def test_layouts_may_change_from_save_to_save(world, directory):
    store = hpc.Store(world, directory)
    whole = torch.arange(24.0).view(6, 4)
    for step, cut in enumerate((by_rows, by_rows, by_columns, None, by_rows)):
        given = whole + step if cut is None else cut(whole + step, world.rank, world.size)
        store.save({"a": given}, step=step, wait=True)
        assert bits(store.load().state["a"]) == bits(whole + step)
    store.close()
