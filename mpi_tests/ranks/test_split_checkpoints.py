"""Checkpoints of sharded models: written in pieces, read by any number of ranks in any division."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from safetensors.torch import load_file

import hpctrain as hpc
from hpctrain.checkpoint import export, list_checkpoints
from hpctrain.pieces import Piece
from mpi_tests.ranks.sharded_kit import adamw, assert_equal, build, train, train_alone, whole
from mpi_tests.ranks.test_loader import first_ranks
from mpi_tests.ranks.test_saver import common


@contextmanager
def run(world, folder, shard):
    """A model of its own, divided so or not at all, with its saver."""
    if shard is None:
        model = build()
        replica = hpc.distribute(world, model, adamw(model))
        yield from_parts(world, folder, replica)
        replica.close()
        return
    with hpc.Grid(world) as grid:
        model = hpc.split(grid, build(), shard=shard)
        options = {"bucket_bytes": 256} if shard == "state" else {}  # messages, also in a node
        replica = hpc.distribute(world, model, adamw(model), grid=grid, **options)
        yield from_parts(world, folder, replica)
        replica.close()


def from_parts(world, folder, replica):
    saver = hpc.Saver(world, folder, replica, every_s=None)
    return replica, saver


def state(replica):
    """Weights and state, whole, as one process would have them."""
    tensors = dict(whole(replica.model))
    for number, values in replica.optimizer.state_dict()["state"].items():
        for key, value in values.items():
            known = value.full_tensor() if hasattr(value, "full_tensor") else value
            if isinstance(known, Piece):
                runs = sorted(replica.world.comm.allgather((known.offset, known.tensor.tolist())))
                elements = [one for _, run in runs for one in run]
                known = torch.tensor(elements, dtype=known.tensor.dtype).view(known.shape)
            tensors[f"{number}.{key}"] = known.clone()
    return tensors


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_another_division_resumes_with_the_same_bits(world, tmp_path):
    folder = common(world, tmp_path)
    with run(world, folder, "parameters") as (replica, saver):
        train(world, replica, batches=2)
        saver.save(wait=True)
        expected = state(replica)
        saver.close()
    for other in ("gradients", None):
        with run(world, folder, other) as (replica, saver):
            assert saver.restore() is not None
            assert_same(state(replica), expected)
            train(world, replica, batches=2, first=2)
            assert_equal(replica.model, train_alone(world.size))
            saver.close()


def test_divided_state_goes_to_every_division_and_back(world, tmp_path):
    folder = common(world, tmp_path)
    expected = None
    for number, shard in enumerate(("state", "parameters", "state", None)):
        with run(world, folder, shard) as (replica, saver):
            assert (saver.restore() is None) == (expected is None)
            if expected is not None:
                assert_same(state(replica), expected)
            train(world, replica, batches=1, first=number)
            saver.save(wait=True)
            expected = state(replica)
            if number == 3:
                assert_equal(replica.model, train_alone(world.size))
            saver.close()
    with first_ranks(world, max(1, world.size - 1)) as some:
        if some is not None:
            with run(some, folder, "state") as (replica, saver):
                saver.restore()
                assert_same(state(replica), expected)
                assert train(some, replica, batches=1, first=4)[0].moved
                saver.save(wait=True)
                if some.rank == 0:
                    torch.save(state(replica), folder / "expected.pt")
                else:
                    state(replica)
                saver.close()
    world.comm.Barrier()
    with run(world, folder, "state") as (replica, saver):
        saver.restore()
        assert_same(state(replica), torch.load(folder / "expected.pt"))
        saver.close()


def test_another_number_of_ranks_resumes_with_the_same_bits(world, tmp_path):
    folder = common(world, tmp_path)
    with run(world, folder, "parameters") as (replica, saver):
        train(world, replica, batches=2)
        saver.save(wait=True)
        expected = state(replica)
        saver.close()
    for count in range(1, world.size):
        with first_ranks(world, count) as some:
            if some is None:
                continue
            for shard in ("parameters", None):
                with run(some, folder, shard) as (replica, saver):
                    assert saver.restore().num_ranks == world.size
                    assert_same(state(replica), expected)
                    assert train(some, replica, batches=1, first=3)[0].moved
                    saver.close()


def test_one_process_is_taken_up_by_shards_and_exported_whole(world, tmp_path):
    folder = common(world, tmp_path)
    with first_ranks(world, 1) as some:
        if some is not None:
            with run(some, folder, None) as (replica, saver):
                train(some, replica, batches=2)
                saver.save(wait=True)
                saver.close()
                torch.save(state(replica), folder / "expected.pt")
    expected = torch.load(folder / "expected.pt")
    with run(world, folder, "parameters") as (replica, saver):
        saver.restore()
        assert_same(state(replica), expected)
        train(world, replica, batches=1)
        saver.save(wait=True)
        after = whole(replica.model)
        saver.close()
    if world.rank == 0:
        export(list_checkpoints(folder)[-1].path, folder / "whole.safetensors")
        assert_same(load_file(folder / "whole.safetensors"), after)
    world.comm.Barrier()


def test_states_by_hand(world):
    """`state_dict` and `load_state_dict`: shards, or whole tensors of one process."""
    with hpc.Grid(world) as grid:
        model = hpc.split(grid, build(), shard="parameters")
        replica = hpc.distribute(world, model, adamw(model), grid=grid)
        train(world, replica, batches=2)
        kept = replica.state_dict()
        expected = state(replica)
        alone = build()
        optimizer = adamw(alone)
        one = {
            "model": {n: t for n, t in expected.items() if n in alone.state_dict()},
            "param_groups": optimizer.state_dict()["param_groups"],
            "state": {},
        }
        for name, tensor in expected.items():
            number, _, key = name.partition(".")
            if number.isdecimal():
                one["state"].setdefault(int(number), {})[key] = tensor
        optimizer.load_state_dict({k: v for k, v in one.items() if k != "model"})
        other = hpc.split(grid, build(), shard="gradients")
        second = hpc.distribute(world, other, adamw(other), grid=grid)
        second.load_state_dict(one)
        assert_same(state(second), expected)
        second.load_state_dict(kept)
        assert_same(state(second), expected)
        train(world, second, batches=2, first=2)
        assert_equal(other, train_alone(world.size))
        for made in (replica, second):
            made.close()
