"""Two optimizers of different classes on one loss: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.replica import HorovodTraining
from hpctrain.replica.equal_ranks import digest
from mpi_tests.built import BUILT
from mpi_tests.models import batch
from mpi_tests.ranks.pair import STEPS, build

WAYS = {
    "node": ("mpi", {}),
    "node-replicated": ("mpi", {"update": "replicated"}),
    "node-shared-weights": ("mpi", {"update": "sharded", "share_parameters": True}),
    "arena": ("mpi", {"bucket_bytes": 512}),
    "torch": ("torch", {}),
    "horovod": ("horovod", {"horovod": HorovodTraining(fusion="horovod")}),
}


def optimizers(model):
    """As Muon's authors recommend."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def whole_loss(alone, step, size):
    chunks = batch(step, [3] * size)
    return sum(cross_entropy(alone(x, 0), y) for x, y in chunks) / size


@pytest.fixture(params=[way for way, (engine, _) in WAYS.items() if engine in BUILT])
def distribute(request, world, engines):
    name, options = WAYS[request.param]
    if world.size == 1 and options.get("share_parameters"):
        pytest.skip("one rank shares its weights with nobody")
    made = []

    def make(model, given, **more):
        made.append(hpc.distribute(world, model, given, engine=engines[name], **options, **more))
        return made[-1]

    yield make
    for replica in made:
        replica.close()


@pytest.mark.parametrize("loop", ["replica", "plain"])
def test_equal_to_one_process(world, distribute, loop):
    model, alone = build(), build()
    given, own = optimizers(model), optimizers(alone)
    replica = distribute(model, given)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in (*given, *own)]
    for step in range(STEPS):
        x, y = batch(step, [3] * world.size)[world.rank]
        if loop == "replica":
            replica.backward(cross_entropy(replica(x, 0), y))
            assert replica.step()
        else:
            for optimizer in given:
                optimizer.zero_grad()
            cross_entropy(model(x, 0), y).backward()
            for optimizer in given:
                optimizer.step()
        for optimizer in own:
            optimizer.zero_grad()
        whole_loss(alone, step, world.size).backward()
        for optimizer in own:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert replica.num_steps == STEPS
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-6)  # Muon computes in bfloat16
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    assert "Muon + AdamW" in replica.describe()


def test_the_state_goes_on_elsewhere(world, distribute):
    model, other = build(), build()
    replica = distribute(model, optimizers(model))

    def train(one, trained, steps):
        for step in steps:
            x, y = batch(step, [3] * world.size)[world.rank]
            one.backward(cross_entropy(trained(x, 0), y))
            one.step()

    train(replica, model, range(3))
    state = copy.deepcopy(replica.state_dict())
    other.load_state_dict(model.state_dict())
    second = distribute(other, optimizers(other))
    second.load_state_dict(state)
    train(replica, model, range(3, 6))
    train(second, other, range(3, 6))
    for mine, again in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, again)


def test_a_saver_resumes_them(world, engines, tmp_path_factory):
    path = world.comm.bcast(
        str(tmp_path_factory.mktemp("several")) if world.rank == 0 else None, root=0
    )
    x, y = batch(0, [8 * world.size])[0]

    def run(directory, epochs):
        model = build()
        replica = hpc.distribute(world, model, optimizers(model), engine=engines["mpi"])
        loader = hpc.Loader(world, (x, y), global_batch=2 * world.size)
        saver = hpc.Saver(world, f"{path}/{directory}", replica, loader)
        for mine, targets in saver.resume(num_epochs=epochs):
            replica.backward(cross_entropy(replica(mine, 0), targets), num_samples=len(targets))
            replica.step()
        saver.close()
        replica.close()
        return model

    run("halved", 1)
    resumed, straight = run("halved", 2), run("straight", 2)
    for mine, other in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_bf16_pure(world, engines):
    model = build().float()
    replica = hpc.distribute(
        world, model, optimizers(model), engine=engines["mpi"], precision="bf16-pure"
    )
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        x, y = batch(step, [3] * world.size)[world.rank]
        replica.backward(cross_entropy(replica(x.float(), 0), y))
        assert replica.step()
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1
    replica.close()


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (lambda m: [], "empty"),
        (lambda m: [torch.optim.SGD(m.parameters(), 0.1), "adam"], "str"),
        (lambda m: [torch.optim.SGD(m.parameters(), 0.1) for _ in "ab"], "twice"),
        (
            lambda m: [
                torch.optim.LBFGS(list(m.parameters())[:1]),
                torch.optim.SGD(list(m.parameters())[1:], 0.1),
            ],
            "LBFGS",
        ),
    ],
)
def test_lists_that_cannot_be(world, engines, given, word):
    model = build()
    with pytest.raises(ConfigError, match=word):
        hpc.distribute(world, model, given(model), engine=engines["mpi"])


def test_a_closure_is_refused(world, engines):
    model = build()
    replica = hpc.distribute(world, model, optimizers(model), engine=engines["mpi"])
    with pytest.raises(ConfigError, match=r"step\(closure\) with several"):
        replica.optimizer.step(lambda: 0.0)
    replica.close()
