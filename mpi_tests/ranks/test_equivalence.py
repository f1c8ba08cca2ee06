"""n ranks train like one process with the same global batch: every engine, model and optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.replica.equal_ranks import digest
from hpctrain.world import roll_call
from mpi_tests.built import BUILT
from mpi_tests.full import FULL
from mpi_tests.models import MODELS, OPTIMIZERS, SparseEmbedding, batch

STEPS = 50


def build(kind, compiled=False):
    torch.manual_seed(5)
    model = kind().double()
    return torch.compile(model) if compiled else model


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.7)


def train_alone(world, model, optimizer, sizes_of, accumulate=1):
    """Collective: one process trains; the others sleep meanwhile, and get what came of it."""
    told = None
    if world.rank == 0:
        _train(model, optimizer, world.size, sizes_of, accumulate)
        told = model.state_dict(), optimizer.state_dict()
    roll_call(world.comm, "training alone", timeout_s=120)
    weights, state = world.comm.bcast(told, root=0)
    if world.rank != 0:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)


def _train(model, optimizer, size, sizes_of, accumulate):
    """One process: the average over all chunks of a global batch, weighted by samples."""
    schedule = schedule_of(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [batch(step * accumulate + a, sizes_of(a, size)) for a in range(accumulate)]
        total = sum(len(y) for part in parts for _, y in part)
        for part in parts:
            for chunk, (x, y) in enumerate(part):
                (cross_entropy(model(x, chunk), y) * len(y) / total).backward()
        optimizer.step()
        schedule.step()


def train_together(world, replica, sizes_of, accumulate=1):
    """All ranks: each its own chunk; a digest of the weights after every step."""
    schedule = schedule_of(replica.optimizer)
    digests = []
    for step in range(STEPS):
        for a in range(accumulate):
            x, y = batch(step * accumulate + a, sizes_of(a, world.size))[world.rank]
            replica.backward(cross_entropy(replica(x, world.rank), y), num_samples=len(y))
            moved = replica.step()
            assert bool(moved) == (a == accumulate - 1)
        schedule.step()
        digests.append(digest(replica.model.parameters()))
    return digests


def assert_equal(world, model, alone, digests):
    everyone = world.comm.allgather(digests)
    assert all(other == digests for other in everyone), "ranks are not bit-identical"
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-9), name


def equal_sizes(part, size):
    return [3] * size


def unequal_sizes(part, size):
    return [1 + (rank + part) % 3 for rank in range(size)]


CASES = [
    *[(name, "adamw", equal_sizes) for name in MODELS],
    *[("mlp", name, unequal_sizes) for name in OPTIMIZERS],
    ("branches", "sgd", unequal_sizes),
    ("lstm", "adagrad", unequal_sizes),
]


# What an optimizer does is the same on every engine: all of them run with `mpi`, and with the
# others what exercises the exchange. `make test-all` runs everything with everything.
CORE = [case for case in CASES if case[:2] in {("branches", "sgd"), ("mlp", "adamw-fused")}]
CORE += [case for case in CASES if case[0] in ("conv-batchnorm", "complex", "tied")]
MATRIX = [(e, *case) for e in BUILT for case in (CASES if FULL or e == "mpi" else CORE)]


@pytest.mark.parametrize(("engine_name", "model_name", "optimizer_name", "sizes_of"), MATRIX)
def test_equal_to_one_process(engines, world, engine_name, model_name, optimizer_name, sizes_of):
    model, alone = build(MODELS[model_name]), build(MODELS[model_name])
    optimizer, own = OPTIMIZERS[optimizer_name](model), OPTIMIZERS[optimizer_name](alone)
    replica = hpc.distribute(world, model, optimizer, engine=engines[engine_name])
    digests = train_together(world, replica, sizes_of)
    train_alone(world, alone, own, sizes_of)
    assert_equal(world, model, alone, digests)
    compare_states(optimizer.state_dict(), own.state_dict())
    replica.close()


def compare_states(mine, other):
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()  # unused parameters have none
    for key, values in other["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(mine["state"][key][name], value, rtol=0, atol=1e-9), name
            else:
                assert mine["state"][key][name] == value


@pytest.mark.parametrize("engine_name", BUILT)
def test_accumulation_equals_one_big_batch(engines, world, engine_name):
    model, alone = build(MODELS["mlp"]), build(MODELS["mlp"])
    optimizer, own = OPTIMIZERS["adamw"](model), OPTIMIZERS["adamw"](alone)
    replica = hpc.distribute(world, model, optimizer, engine=engines[engine_name], accumulate=3)
    before = replica.counts()["messages"]
    digests = train_together(world, replica, unequal_sizes, accumulate=3)
    expected = STEPS if world.size > 1 else 0  # once per step, not per backward
    assert replica.counts()["messages"] - before == expected
    train_alone(world, alone, own, unequal_sizes, accumulate=3)
    assert_equal(world, model, alone, digests)
    replica.close()


def test_sparse_gradients(engines, world):
    model, alone = build(SparseEmbedding), build(SparseEmbedding)
    optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone))
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    digests = train_together(world, replica, equal_sizes)
    train_alone(world, alone, own, equal_sizes)
    assert_equal(world, model, alone, digests)
    replica.close()


def test_a_compiled_model(engines, world):
    model, alone = build(MODELS["tied"]), build(MODELS["tied"])
    optimizer, own = OPTIMIZERS["adamw"](model), OPTIMIZERS["adamw"](alone)
    compiled = torch.compile(model, backend="aot_eager")
    replica = hpc.distribute(world, compiled, optimizer, engine=engines["mpi"])
    digests = train_together(world, replica, equal_sizes)
    train_alone(world, alone, own, equal_sizes)
    assert_equal(world, model, alone, digests)
    replica.close()


def test_two_runs_are_bit_identical_on_mpi(engines, world):
    runs = []
    for _ in range(2):
        model = build(MODELS["transformer"])
        optimizer = OPTIMIZERS["adamw"](model)
        replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
        runs.append(train_together(world, replica, unequal_sizes))
        replica.close()
    assert runs[0] == runs[1]


def test_one_rank_is_bit_for_bit_what_torch_does(engines, world):
    if world.size > 1:
        pytest.skip("one rank alone")
    model, alone = build(MODELS["mlp"]), build(MODELS["mlp"])
    optimizer, own = OPTIMIZERS["adamw"](model), OPTIMIZERS["adamw"](alone)
    replica = hpc.distribute(world, model, optimizer)
    for step in range(5):
        ((x, y),) = batch(step, [7])
        replica.backward(cross_entropy(replica(x, 0), y), num_samples=7)
        replica.step()
        own.zero_grad()
        cross_entropy(alone(x, 0), y).backward()
        own.step()
    assert digest(model.parameters()) == digest(alone.parameters())
    replica.close()


def test_a_state_dict_of_one_process_loads_and_goes_on(engines, world):
    model, alone = build(MODELS["mlp"]), build(MODELS["mlp"])
    own = OPTIMIZERS["adamw"](alone)
    train_alone(world, alone, own, equal_sizes)
    model.load_state_dict(alone.state_dict())
    optimizer = OPTIMIZERS["adamw"](model)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    replica.load_state_dict(copy.deepcopy(own.state_dict()))
    digests = train_together(world, replica, equal_sizes)
    train_alone(world, alone, own, equal_sizes)
    assert_equal(world, model, alone, digests)
    compare_states(replica.state_dict(), own.state_dict())
    replica.close()


def test_everyone_starts_with_rank_zeros_state(engines, world):
    torch.manual_seed(world.rank)  # ranks differ in weights, buffers and optimizer state
    model = MODELS["conv-batchnorm"]().double()
    optimizer = OPTIMIZERS["adamw"](model)
    for _ in range(2):
        model(torch.randn(4, 12, dtype=torch.float64), 0).sum().backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1 * (world.rank + 1)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    tensors = [*model.state_dict().values()]
    tensors += [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    assert len(set(world.comm.allgather(digest(tensors)))) == 1
    assert optimizer.param_groups[0]["lr"] == 0.1
    replica.close()


def test_models_that_differ_are_refused_by_name(engines, world):
    if world.size == 1:
        pytest.skip("needs somebody to differ from")
    width = 8 + (world.rank == world.size - 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, width))
    with pytest.raises(ConfigError, match=rf"rank {world.size - 1} of.*0\.weight \(9, 4\)"):
        hpc.distribute(
            world, model, torch.optim.SGD(model.parameters(), 0.1), engine=engines["mpi"]
        )
