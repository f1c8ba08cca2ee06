"""Stages with divided layers, also in shards over data, train as one process does."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.precision import LossScaling
from hpctrain.tensor_parallel import vocabulary_cross_entropy
from mpi_tests.pipeline_kit import FEATURES, TOLERANCE, Trained, build, global_batch
from mpi_tests.ranks.test_loader import first_ranks
from mpi_tests.ranks.test_saver import common

LAYERS = {"0": "column", "2": "row", "4": "column", "6": "row", "8": "column"}
DIVIDED = {"tensor": LAYERS}
ALL = {**DIVIDED, "shard": "parameters"}
NUM_WORDS = 12


def shapes():
    """Grids to try: pipeline x tensor; what is left is data."""
    size = MPI.COMM_WORLD.Get_size()
    return {1: [(1, 1)], 2: [(1, 2)], 3: [(1, 3)]}.get(size, [(2, 2)])


@pytest.fixture(scope="module", params=shapes(), ids=str)
def grid(world, request):
    pipeline, tensor = request.param
    with hpc.Grid(world, pipeline=pipeline, tensor=tensor) as made:
        yield made


CASES = {
    "divided": (DIVIDED, 1),
    "divided-and-sharded": (ALL, 1),
    "gradients-accumulate": ({**DIVIDED, "shard": "gradients"}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(grid, case):
    """Smaller last batches, tied weights over stages, clipping over the grid, accumulation."""
    divide, accumulate = CASES[case]
    pair = Trained(grid, divide=divide, accumulate=accumulate, clip_norm=0.05)
    pair.replica.measures_norm = True
    for number in range(4):
        done = pair.learn(number)
        if done.due:
            norm = pair.learn_alone(range(number + 1 - accumulate, number + 1), 0.05)
            assert abs(float(done.norm) - float(norm)) < TOLERANCE
    pair.check()


def test_evaluation_and_description(grid):
    pair = Trained(grid, divide=ALL)
    x, _ = global_batch(1, 7)
    with torch.no_grad():
        assert torch.allclose(pair.replica(x), pair.alone(x), rtol=0, atol=TOLERANCE)
    told = pair.replica.describe()
    assert f"stage {grid.pipeline - 1}" in told
    assert grid.tensor == 1 or f"over {grid.tensor} ranks" in told
    pair.replica.close()


def test_different_batches_are_refused_on_all_ranks(grid, world):
    pair = Trained(grid, divide=DIVIDED)
    pair.learn(0)
    x, y, _, _ = pair.batch(0)
    odd = world.rank == world.size - 1
    if world.size > 1:
        with pytest.raises(ConfigError, match="different contents"):
            pair.replica.learn(mse_loss, x + odd, y, num_samples=len(y))
        with pytest.raises(ConfigError, match="rows"):
            pair.replica.learn(mse_loss, x, y[:1] if odd else y, num_samples=len(y))
    pair.learn_alone([0])
    pair.check()


def test_an_overflow_on_one_rank_skips_the_step_of_all(grid, world):
    def single():
        return build().float()

    scaling = LossScaling(init_scale=16.0)
    pair = Trained(grid, single, divide=DIVIDED, precision="fp16", scaling=scaling)
    x, y = (one.float() for one in global_batch(0, 8))
    handle = None
    if world.rank == world.size - 1:
        last = list(pair.replica.model.parameters())[-1]
        handle = last.register_hook(lambda g: g * float("inf"))
    assert not pair.replica.learn(mse_loss, x, y)
    if handle is not None:
        handle.remove()
    assert pair.replica.learn(mse_loss, x, y)
    assert world.comm.allgather(pair.replica.num_skipped) == [1] * world.size
    pair.replica.close()


def words():
    """A chain with an embedding that is its head's weight, too."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Embedding(NUM_WORDS, FEATURES),
        nn.Linear(FEATURES, 2 * FEATURES),
        nn.Tanh(),
        nn.Linear(2 * FEATURES, FEATURES),
        nn.Linear(FEATURES, NUM_WORDS),
    ).double()
    model[4].weight = model[0].weight
    return model


def test_scores_that_stay_divided_on_the_last_stage(grid):
    patterns = {"0": "vocabulary", "1": "column", "3": "row", "4": "vocabulary"}
    pair = Trained(grid, words, divide={"tensor": patterns})
    for number in range(3):
        drawn = torch.Generator().manual_seed(number)
        x, y = torch.randint(NUM_WORDS, (2, 8, 3), generator=drawn)
        loss_fn = vocabulary_cross_entropy if grid.tensor > 1 else flat_cross_entropy
        done = pair.replica.learn(loss_fn, x, y, num_samples=8)
        pair.own.zero_grad()
        loss = flat_cross_entropy(pair.alone(x), y)
        loss.backward()
        pair.own.step()
        assert abs(float(done.loss) - float(loss.detach())) < TOLERANCE
    with torch.no_grad():
        assert torch.allclose(pair.replica(x), pair.alone(x), rtol=0, atol=TOLERANCE)
    pair.check()


def flat_cross_entropy(scores, y):
    return cross_entropy(scores.flatten(0, 1), y.flatten())


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_other_grids_resume(world, grid, tmp_path):
    folder = common(world, tmp_path)
    pair = Trained(grid, divide=ALL)
    saver = hpc.Saver(world, folder, pair.replica, every_s=None)
    pair.learn(0)
    pair.learn_alone([0])
    saver.save(wait=True)
    saver.close()
    expected = pair.alone
    pair.check()

    def compare(model):
        wanted = dict(expected.named_parameters(remove_duplicate=False))
        for name, parameter in model.named_parameters():
            assert torch.allclose(whole(parameter), wanted[name], rtol=0, atol=TOLERANCE), name

    with hpc.Grid(world, pipeline=world.size if world.size < 5 else 4) as other:
        sharded = Trained(other, divide={"shard": "parameters"})
        saver = hpc.Saver(world, folder, sharded.replica, every_s=None)
        assert saver.restore() is not None
        compare(sharded.replica.model)
        saver.save(wait=True)
        saver.close()
        sharded.replica.close()
    again = Trained(grid, divide=DIVIDED)
    saver = hpc.Saver(world, folder, again.replica, every_s=None)
    assert saver.restore() is not None
    compare(again.replica.model)
    saver.close()
    again.replica.close()
    with first_ranks(world, 1) as some:
        if some is not None:
            model = build()
            replica = hpc.distribute(some, model, torch.optim.AdamW(model.parameters(), 0.01))
            saver = hpc.Saver(some, folder, replica, every_s=None)
            assert saver.restore() is not None
            compare(model)
            saver.close()
            replica.close()
    world.comm.Barrier()
