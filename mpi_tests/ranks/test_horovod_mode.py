"""Horovod's own DistributedOptimizer and fusion under a replica: the same rules as the arena's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.engines import HorovodOptions
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.replica import HorovodTraining
from hpctrain.replica.equal_ranks import digest
from mpi_tests.built import BUILT
from mpi_tests.models import MODELS, OPTIMIZERS, SparseEmbedding, batch
from mpi_tests.ranks import test_equivalence as equivalence
from mpi_tests.ranks.test_equivalence import build, equal_sizes, unequal_sizes

pytestmark = pytest.mark.skipif("horovod" not in BUILT, reason="Horovod is not built here")


@pytest.fixture
def distribute(world, engines):
    """`hpc.distribute` by Horovod's fusion; replicas are closed when the test ends."""
    made = []

    def make(model, optimizer, *, accumulate=1, overlap=None, **settings):
        horovod = HorovodTraining(fusion="horovod", **settings)
        replica = hpc.distribute(
            world,
            model,
            optimizer,
            engine=engines["horovod"],
            accumulate=accumulate,
            overlap=overlap,
            horovod=horovod,
        )
        made.append(replica)
        return replica

    yield make
    for replica in made:
        replica.close()


def pair(model_name, optimizer_name):
    model, alone = build(MODELS[model_name]), build(MODELS[model_name])
    return model, alone, OPTIMIZERS[optimizer_name](model), OPTIMIZERS[optimizer_name](alone)


def check_equal_to_one_process(world, distribute, names, sizes_of, *, accumulate=1, **arguments):
    model, alone, optimizer, own = pair(*names)
    replica = distribute(model, optimizer, accumulate=accumulate, **arguments)
    digests = equivalence.train_together(world, replica, sizes_of, accumulate)
    equivalence.train_alone(world, alone, own, sizes_of, accumulate)
    equivalence.assert_equal(world, model, alone, digests)
    equivalence.compare_states(optimizer.state_dict(), own.state_dict())
    return replica


CASES = [
    *[(name, "adamw", equal_sizes) for name in ("mlp", "branches", "tied", "complex")],
    *[(name, "sgd", unequal_sizes) for name in ("mlp", "branches", "conv-batchnorm")],
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("model_name", "optimizer_name", "sizes_of"), CASES)
def test_equal_to_one_process(world, distribute, overlap, model_name, optimizer_name, sizes_of):
    names = (model_name, optimizer_name)
    check_equal_to_one_process(world, distribute, names, sizes_of, overlap=overlap)


def test_sparse_gradients(world, distribute):
    model, alone = build(SparseEmbedding), build(SparseEmbedding)
    optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone))
    replica = distribute(model, optimizer, overlap=True)
    digests = equivalence.train_together(world, replica, equal_sizes)
    equivalence.train_alone(world, alone, own, equal_sizes)
    equivalence.assert_equal(world, model, alone, digests)


@pytest.mark.parametrize("overlap", [False, True])
def test_accumulation_exchanges_once_per_step(world, distribute, overlap):
    replica = check_equal_to_one_process(
        world, distribute, ("mlp", "adamw"), unequal_sizes, accumulate=3, overlap=overlap
    )
    each = len(list(replica.model.parameters())) + 1 if world.size > 1 else 0
    assert replica.counts()["messages"] == equivalence.STEPS * each


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model_name", ["branches", "complex"])
def test_groups(world, distribute, model_name, overlap):
    # Raw Horovod hangs when a group is complete on one rank and not on another.
    names = (model_name, "adamw")
    check_equal_to_one_process(
        world, distribute, names, unequal_sizes, num_groups=2, overlap=overlap
    )


def test_predivision(world, distribute):
    check_equal_to_one_process(
        world, distribute, ("mlp", "sgd"), unequal_sizes, gradient_predivide_factor=world.size + 0.5
    )


def train(world, replica, steps=10, samples=True):
    digests = []
    for step in range(steps):
        x, y = batch(step, equal_sizes(0, world.size))[world.rank]
        loss = cross_entropy(replica(x, world.rank), y)
        replica.backward(loss, num_samples=len(y) if samples else None)
        assert replica.step()
        digests.append(digest(replica.model.parameters()))
    assert all(other == digests for other in world.comm.allgather(digests))
    return torch.cat([p.detach().flatten() for p in replica.model.parameters()])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_groups", [0, 2])
def test_half_precision_on_the_wire(world, distribute, num_groups, overlap):
    exact, _, exactly, _ = pair("branches", "sgd")
    close, _, closely, _ = pair("branches", "sgd")
    wanted = train(world, distribute(exact, exactly))
    halved = distribute(close, closely, compression="fp16", num_groups=num_groups, overlap=overlap)
    got = train(world, halved)
    assert torch.allclose(got, wanted, rtol=0, atol=2e-3)
    if world.size > 1:
        assert not torch.equal(got, wanted)  # it did travel as halves
    assert halved.counts()["bytes"] == 2 * len(got)
    assert "fp16" in halved.describe()


def test_half_precision_holds_sums_that_a_half_cannot(world, distribute):
    model = torch.nn.Linear(4, 1).double()
    replica = distribute(model, torch.optim.SGD(model.parameters(), 0.1), compression="fp16")
    for _ in range(2):
        loss = 100 * model(torch.ones(1, 4, dtype=torch.float64)).mean()
        replica.backward(loss, num_samples=4096)  # 4096 * 100 is infinite in half precision
        assert torch.allclose(model.weight.grad, torch.tensor(100.0).double(), rtol=1e-3)
        replica.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_parameters_of_sixteen_bits(world, distribute, dtype, compression):
    model = torch.nn.Linear(4, 3).to(dtype)
    replica = distribute(model, torch.optim.SGD(model.parameters(), 0.1), compression=compression)
    x = torch.full((2, 4), world.rank + 1.0, dtype=dtype)
    replica.backward(model(x).sum())
    mean = 2 * sum(rank + 1 for rank in range(world.size)) / world.size
    assert model.weight.grad.dtype == dtype
    assert torch.allclose(model.weight.grad.float(), torch.tensor(mean), rtol=1e-2)
    assert replica.step()


def test_layouts_survive(world, distribute):
    model = torch.nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
    replica = distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    x = torch.full((1, 3, 5, 5), world.rank + 1.0, dtype=torch.float64)
    replica.backward(model(x.to(memory_format=torch.channels_last)).sum())
    mean = 9 * sum(rank + 1 for rank in range(world.size)) / world.size
    assert torch.allclose(model.weight.grad, torch.tensor(mean).double())
    assert model.weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.fixture
def power_of_two(world):
    if world.size & (world.size - 1):
        pytest.skip("adasum is for a power of two ranks")


@pytest.mark.parametrize("settings", [{}, {"num_groups": 2}])
@pytest.mark.usefixtures("power_of_two")
def test_adasum_moves_all_ranks_alike(world, distribute, settings):
    runs = []
    for _ in range(2):
        model, _, optimizer, _ = pair("branches", "adamw")
        replica = distribute(model, optimizer, op="adasum", **settings)
        runs.append(train(world, replica, samples=False))
    assert torch.allclose(*runs, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("power_of_two")
def test_adasum_of_parallel_and_of_orthogonal_gradients(world, distribute):
    model = torch.nn.Linear(world.size, 1, bias=False).double()
    replica = distribute(model, torch.optim.SGD(model.parameters(), 0.1), op="adasum", accumulate=2)
    for _ in range(2):
        replica.backward(model(torch.ones(1, world.size, dtype=torch.float64)).sum())
    assert torch.allclose(model.weight.grad, torch.ones(1, world.size).double())  # the average
    replica.step()
    for _ in range(2):
        own = torch.eye(world.size, dtype=torch.float64)[world.rank : world.rank + 1]
        replica.backward(model(own).sum())
    assert torch.allclose(model.weight.grad, torch.ones(1, world.size).double())  # the sum


@pytest.mark.usefixtures("power_of_two")
def test_adasum_refuses_samples_on_all_ranks(world, distribute):
    if world.size == 1:
        pytest.skip("one rank has nobody to be weighed against")
    model, _, optimizer, _ = pair("mlp", "sgd")
    replica = distribute(model, optimizer, op="adasum")
    x, y = batch(0, equal_sizes(0, world.size))[world.rank]
    samples = 3 if world.rank == world.size - 1 else 1  # only the last rank's tells
    with pytest.raises(ConfigError, match="num_samples has no effect"):
        replica.backward(cross_entropy(replica(x, 0), y), num_samples=samples)
    assert not replica.step()
    replica.zero_grad()
    replica.backward(cross_entropy(replica(x, 0), y))
    assert replica.step()


def test_adasum_refuses_other_numbers_of_ranks_and_complex_weights(world, distribute):
    if world.size & (world.size - 1):
        model, _, optimizer, _ = pair("mlp", "sgd")
        with pytest.raises(ConfigError, match="power of two"):
            distribute(model, optimizer, op="adasum")
    else:
        model, _, optimizer, _ = pair("complex", "sgd")
        with pytest.raises(ConfigError, match=r"weight is complex.*adasum"):
            distribute(model, optimizer, op="adasum")


def test_settings_that_do_not_fit_the_engine(world, engines):
    model, _, optimizer, _ = pair("mlp", "sgd")
    fused = HorovodTraining(fusion="horovod")
    with pytest.raises(ConfigError, match="on the mpi engine"):
        hpc.distribute(world, model, optimizer, engine=engines["mpi"], horovod=fused)
    with pytest.raises(ConfigError, match="fusion_threshold_bytes"):
        hpc.distribute(world, model, optimizer, horovod=fused, bucket_bytes=1)
    late = HorovodTraining(options=HorovodOptions(cycle_time_ms=7))
    with pytest.raises(ConfigError, match="too late"):
        hpc.distribute(world, model, optimizer, engine=engines["horovod"], horovod=late)
    with pytest.raises(ConfigError, match="already runs with"):
        hpc.distribute(world, model, optimizer, horovod=late)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("overlap", [False, True])
def test_habits_of_a_users_loop(world, distribute, overlap):
    """Freezing, clipping, zero_grad, create_graph, several backward calls: as on one process."""
    model, alone, optimizer, own = pair("mlp", "adamw")
    replica = distribute(model, optimizer, overlap=overlap)
    for step in range(6):
        chunks = batch(step, equal_sizes(0, world.size))
        model.layers[0].weight.requires_grad_(step not in (1, 2))
        alone.layers[0].weight.requires_grad_(step not in (1, 2))
        replica.zero_grad(set_to_none=step % 2 == 0)
        own.zero_grad()
        for _ in range(1 + step % 2):  # calls add up, as in torch
            x, y = chunks[world.rank]
            loss = cross_entropy(replica(x, world.rank), y)
            replica.backward(loss, num_samples=len(y), create_graph=step == 4)
            for x, y in chunks:
                (cross_entropy(alone(x, 0), y) / world.size).backward()
        for one in (model, alone):
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        assert replica.step()
        own.step()
        assert torch.allclose(model.layers[0].weight, alone.layers[0].weight, rtol=0, atol=1e-9)
    equivalence.compare_states(optimizer.state_dict(), own.state_dict())


def test_foreign_and_edited_gradients_are_refused_by_name(world, distribute):
    model, _, optimizer, _ = pair("mlp", "sgd")
    replica = distribute(model, optimizer, accumulate=2)
    x, y = batch(0, equal_sizes(0, world.size))[world.rank]
    with pytest.raises(ConfigError, match=r"accumulate=2.*replica\.backward"):
        cross_entropy(model(x, 0), y).backward()
    replica.zero_grad()
    replica.backward(cross_entropy(replica(x, 0), y))
    model.zero_grad()
    with pytest.raises(ConfigError, match="gradients were changed"):
        replica.backward(cross_entropy(replica(x, 0), y))
    replica.zero_grad()
    for _ in range(2):
        replica.backward(cross_entropy(replica(x, 0), y))
    assert replica.step()


def failing_loss(model, x, y):
    """Its backward pass fails when the gradients of the last layer have left already."""
    hidden = model.layers[0](x)
    hidden.register_hook(lambda _gradient: 1 / 0)
    return cross_entropy(model.layers[2](model.layers[1](hidden)), y)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_backward_can_be_caught(world, distribute, overlap):
    model, alone, optimizer, own = pair("mlp", "sgd")
    replica = distribute(model, optimizer, overlap=overlap)
    chunks = batch(0, equal_sizes(0, world.size))
    x, y = chunks[world.rank]
    with pytest.raises(ZeroDivisionError):
        replica.backward(failing_loss(model, x, y), num_samples=len(y))
    replica.zero_grad()
    replica.backward(cross_entropy(replica(x, 0), y), num_samples=len(y))
    assert replica.step()
    for x, y in chunks:
        (cross_entropy(alone(x, 0), y) / world.size).backward()
    own.step()
    equivalence.assert_equal(world, model, alone, [digest(model.parameters())])


def test_a_backward_interrupted_on_one_rank_alone_is_told_to_the_others(world, distribute):
    if world.size == 1:
        pytest.skip("needs others")
    model, _, optimizer, _ = pair("mlp", "sgd")
    replica = distribute(model, optimizer, overlap=True)
    x, y = batch(0, equal_sizes(0, world.size))[world.rank]
    if world.rank == 0:
        with pytest.raises(ZeroDivisionError):
            replica.backward(failing_loss(model, x, y))
    else:
        with pytest.raises(CollectiveError, match="was interrupted"):
            replica.backward(cross_entropy(replica(x, 0), y))
    replica.zero_grad()
    replica.backward(cross_entropy(replica(x, 0), y))
    assert replica.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_reentrant_checkpoints(world, distribute, overlap):
    def run(model, x):
        for _ in range(2):  # the same layer twice: its gradient is added to twice
            x = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
        return x.sum()

    model = torch.nn.Linear(3, 3).double()
    replica = distribute(model, torch.optim.SGD(model.parameters(), 0.1), overlap=overlap)
    x = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    if overlap and world.size > 1:
        with pytest.raises(ConfigError, match=r"added to twice.*use_reentrant=False"):
            replica.backward(run(model, x))
        replica.zero_grad()
    else:
        replica.backward(run(model, x))
        got = model.weight.grad.clone()
        replica.close()
        model.zero_grad()
        run(model, x).backward()
        assert torch.allclose(got, model.weight.grad)


def test_ranks_that_run_dry(world, distribute):
    model, alone, optimizer, own = pair("branches", "sgd")
    replica = distribute(model, optimizer)
    with replica.join():
        for step in range(1 + world.rank):
            x, y = batch(step, equal_sizes(0, world.size))[world.rank]
            replica.backward(cross_entropy(replica(x, world.rank), y), num_samples=len(y))
            replica.step()
    for step in range(world.size):
        chunks = batch(step, equal_sizes(0, world.size))
        own.zero_grad()
        for rank in range(step, world.size):
            x, y = chunks[rank]
            (cross_entropy(alone(x, rank), y) / (world.size - step)).backward()
        own.step()
    equivalence.assert_equal(world, model, alone, [digest(model.parameters())])


def test_two_replicas_with_the_same_names(world, distribute):
    both = [pair("mlp", "sgd") for _ in range(2)]
    replicas = [distribute(model, optimizer, overlap=True) for model, _, optimizer, _ in both]
    chunks = batch(0, equal_sizes(0, world.size))
    for replica in replicas:
        x, y = chunks[world.rank]
        replica.backward(cross_entropy(replica(x, world.rank), y))
    for replica, (model, alone, _, own) in zip(replicas, both, strict=True):
        assert replica.step()
        for x, y in chunks:
            (cross_entropy(alone(x, 0), y) / world.size).backward()
        own.step()
        equivalence.assert_equal(world, model, alone, [digest(model.parameters())])


def test_growing_and_converting(world, distribute):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    replica = distribute(model, torch.optim.SGD(model[0].parameters(), 0.1))
    model.double()
    replica.optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.2})
    replica.backward(replica(torch.full((1, 3), world.rank + 1.0).double()).sum())
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())
    assert replica.step()
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1


def test_closing_leaves_no_hook_that_sends(world, distribute):
    model, _, optimizer, _ = pair("mlp", "sgd")
    replica = distribute(model, optimizer, overlap=True)
    x, y = batch(0, equal_sizes(0, world.size))[world.rank]
    loss = cross_entropy(model(x, 0), y)
    replica.backward(loss, retain_graph=True)
    replica.close()
    if world.rank == 0:
        loss.backward()  # the old graph, on one rank: nobody is waited for
