"""`replica.learn` does what the explicit calls do, bit for bit, however gradients travel."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.replica import HorovodTraining
from hpctrain.replica.equal_ranks import digest
from mpi_tests.built import BUILT
from mpi_tests.models import OPTIMIZERS, batch
from mpi_tests.ranks.pair import build

STEPS = 6
WAYS = {
    "node": ("mpi", {}),
    "node-replicated": ("mpi", {"update": "replicated"}),
    "node-shared-weights": ("mpi", {"update": "sharded", "share_parameters": True}),
    "arena": ("mpi", {"bucket_bytes": 512}),
    "arena-overlap": ("mpi", {"bucket_bytes": 512, "overlap": True}),
    "torch": ("torch", {}),
    "horovod-arena": ("horovod", {}),
    "horovod": ("horovod", {"horovod": HorovodTraining(fusion="horovod")}),
}
SCALING = hpc.precision.LossScaling(init_scale=1024.0, growth_interval=3, max_skips=5)
OPTIONS = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "clip": {"clip_norm": 0.1},
    "fp16": {"precision": "fp16", "scaling": SCALING, "accumulate": 2, "clip_value": 0.01},
    "bf16": {"precision": "bf16"},
}


@pytest.fixture(params=[way for way, (engine, _) in WAYS.items() if engine in BUILT])
def distribute(request, world, engines):
    name, options = WAYS[request.param]
    if world.size == 1 and options.get("share_parameters"):
        pytest.skip("one rank shares its weights with nobody")
    made = []

    def make(model, optimizer, **more):
        engine = engines[name]
        made.append(hpc.distribute(world, model, optimizer, engine=engine, **options, **more))
        return made[-1]

    yield make
    for replica in made:
        replica.close()


def part(world, step):
    """Uneven shares, with branches that some ranks use alone."""
    return batch(step, [1 + (rank + step) % 3 for rank in range(world.size)])[world.rank]


def scaled(step, size):
    """A loss that is infinite on one rank in one step."""

    def loss_fn(out, target):
        loss = cross_entropy(out.double(), target)
        return loss * math.inf if step == 3 and out.grad_fn is not None else loss

    return loss_fn if size else cross_entropy


def told(step):
    return step.reason, step.due, step.moved, step.scale, step.norm, step.learning_rates


def train_explicitly(world, replica, loss_of, given=True):
    seen = []
    for step in range(STEPS):
        x, y = part(world, step)
        loss = loss_of(step)(replica(x, world.rank), y)
        replica.backward(loss, num_samples=len(y) if given else None)
        seen.append((told(replica.step()), loss.item()))
    return seen


def train_by_learning(world, replica, loss_of):
    seen = []
    for step in range(STEPS):
        x, y = part(world, step)
        done = replica.learn(loss_of(step), x, world.rank, y)
        assert done.loss.grad_fn is None
        seen.append((told(done), done.loss.item()))
    return seen


def same_bits(one, other):
    assert str(one) == str(other)  # NaN and inf included


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", ["mlp", "branches"])
def test_equal_to_the_explicit_calls(world, distribute, kind, name):
    options = OPTIONS[kind]
    overflows = kind == "fp16"

    def loss_of(step):
        return scaled(step, overflows)

    results = []
    for train in (train_explicitly, train_by_learning):
        model = build(name)
        optimizer = OPTIMIZERS["adamw"](model)
        replica = distribute(model, optimizer, **options)
        seen = train(world, replica, loss_of)
        results.append((seen, replica.counts(), replica.num_calls, digest(model.parameters())))
    (explicit, *rest), (learned, *others) = results
    same_bits(explicit, learned)
    assert rest == others
    reasons = [one[0][0] for one in learned]
    if "accumulate" in options:
        assert reasons[::2] == ["accumulating"] * (STEPS // 2)
    if overflows:
        assert "skipped" in reasons
    assert reasons[-1] == "stepped"


def test_a_list_of_optimizers(world, distribute):
    results = []
    for train in (train_explicitly, train_by_learning):
        model = build()
        parameters = list(model.parameters())
        both = [torch.optim.AdamW(parameters[:2], 0.01), torch.optim.SGD(parameters[2:], 0.1)]
        replica = distribute(model, both)
        seen = train(world, replica, lambda _: cross_entropy)
        results.append((str(seen), digest(model.parameters())))
    assert results[0] == results[1]


def test_samples_are_counted_by_the_target(world, distribute):
    """One process with all samples gives the same weights; given explicitly, other counts do."""
    model, alone = build(), build()
    replica = distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    own = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(STEPS):
        chunks = batch(step, [1 + (rank + step) % 3 for rank in range(world.size)])
        x, y = chunks[world.rank]
        replica.learn(cross_entropy, x, world.rank, y)
        own.zero_grad()
        inputs, targets = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        cross_entropy(alone(inputs, 0), targets).backward()
        own.step()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-9)
    before = digest(model.parameters())
    x, y = part(world, 0)
    done = replica.learn(cross_entropy, x, world.rank, y, num_samples=0)
    assert (done.reason, digest(model.parameters())) == ("no samples", before)


def test_inputs_by_name_and_no_target(world, distribute):
    results = []
    for by_name in (False, True):
        model = build()
        replica = distribute(model, OPTIMIZERS["sgd"](model))
        x, y = part(world, 0)
        if by_name:
            replica.learn(cross_entropy, y, x=x, chunk=world.rank)
        else:
            replica.learn(lambda out, _, y=y: cross_entropy(out, y), x, world.rank, None)
        replica.learn(cross_entropy, x, world.rank, y)
        results.append(digest(model.parameters()))
    if world.size == 1:  # without a target every rank counts the same, whatever its samples
        assert results[0] == results[1]


def test_lbfgs_evaluates_the_batch_itself(world, request, distribute):
    def make(model):
        return torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe"
        )

    def held(model):  # a few samples leave directions open in which rounding would grow
        return 0.1 * sum(parameter.square().sum() for parameter in model.parameters())

    model, alone = build(), build()
    if request.node.callspec.params["distribute"] == "node-shared-weights":
        with pytest.raises(ConfigError, match="sharded"):
            distribute(model, make(model))
        return
    replica, own = distribute(model, make(model)), make(alone)
    for step in range(4):
        chunks = batch(step, [1 + (rank + step) % 3 for rank in range(world.size)])
        x, y = chunks[world.rank]
        done = replica.learn(
            lambda out, target: cross_entropy(out, target) + held(model), x, world.rank, y
        )
        assert done
        assert done.note == "stepped"
        inputs, targets = (torch.cat(parts) for parts in zip(*chunks, strict=True))

        def evaluate(inputs=inputs, targets=targets):
            own.zero_grad()
            loss = cross_entropy(alone(inputs, 0), targets) + held(alone)
            loss.backward()
            return loss.detach()

        mean = float(own.step(evaluate))
        told = world.comm.allgather((done.loss.item(), len(y)))
        assert abs(sum(v * n for v, n in told) / sum(n for _, n in told) - mean) < 1e-7
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-7)
    assert replica.num_steps == 4
    assert len(set(world.comm.allgather(digest(model.parameters())))) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [({"accumulate": 2}, "LBFGS .* accumulate=2"), ({"clip_norm": 1.0}, "LBFGS .* clip_norm")],
)
def test_what_lbfgs_cannot_carry_is_refused(world, engines, options, match):
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters())
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"], **options)
    x, y = part(world, 0)
    with pytest.raises(ConfigError, match=match):
        replica.learn(cross_entropy, x, world.rank, y)
    replica.close()


def test_wrong_calls_say_how_it_is_called(world, engines):
    model = build()
    optimizer = OPTIMIZERS["sgd"](model)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    x, y = part(world, 0)
    loss = cross_entropy(replica(x, world.rank), y)
    with pytest.raises(ConfigError, match=r"is a Tensor.*replica\.learn\(loss_fn, x, y\)"):
        replica.learn(loss)
    with pytest.raises(ConfigError, match=r"1 positional .* target are needed"):
        replica.learn(cross_entropy, x)
    with pytest.raises(ConfigError, match="the loss has shape"):
        replica.learn(lambda out, _: out, x, world.rank, y)
    replica.zero_grad()
    assert replica.learn(cross_entropy, x, world.rank, y)
    replica.close()


def test_adasum_has_no_weights(world, engines):
    if "horovod" not in BUILT or world.size not in (1, 2):
        pytest.skip("Adasum is Horovod's, for a power of two")
    model = build()
    settings = HorovodTraining(fusion="horovod", op="adasum")
    optimizer = OPTIMIZERS["sgd"](model)
    replica = hpc.distribute(world, model, optimizer, engine=engines["horovod"], horovod=settings)
    x, y = part(world, 0)
    assert replica.learn(cross_entropy, x, world.rank, y)
    replica.close()
