"""Observers are told what each loop does, in balanced phases, and may come after `distribute`."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError
from mpi_tests.models import OPTIMIZERS, batch
from mpi_tests.ranks.pair import build


class Listener:
    def __init__(self):
        self.told, self.depth = [], 0

    def begin(self, name):
        self.depth += 1
        self.told.append(name)

    def end(self, name):
        self.depth -= 1
        self.told.append(f"/{name}")

    def stepped(self, number):
        self.told.append(f"step {number}")


@pytest.fixture
def observed(world, engines):
    model = build()
    optimizer = OPTIMIZERS["sgd"](model)
    replica = hpc.distribute(world, model, optimizer, engine=engines["mpi"])
    listener = Listener()
    world.observers.append(listener)
    yield replica, optimizer, listener
    world.observers.remove(listener)
    replica.close()


def part(world):
    return batch(0, [3] * world.size)[world.rank]


EXPLICIT = [
    *["forward", "/forward", "backward", "exchange", "/exchange", "/backward"],
    *["update", "/update", "step 1"],
]


def test_explicit_calls_and_learn(world, observed):
    replica, _, listener = observed
    x, y = part(world)
    replica.backward(cross_entropy(replica(x, 0), y), num_samples=3)
    assert replica.num_samples == 3
    replica.step()
    assert listener.told == EXPLICIT
    listener.told.clear()
    replica.learn(cross_entropy, x, 0, y)
    assert listener.told == [*EXPLICIT[:-1], "step 2"]


def test_a_plain_loop(world, observed):
    replica, optimizer, listener = observed
    x, y = part(world)
    cross_entropy(replica.model(x, 0), y).backward()
    assert replica.num_samples is None
    optimizer.step()
    assert listener.told == EXPLICIT[2:]


def test_a_closure(world, observed):
    replica, optimizer, listener = observed
    x, y = part(world)

    def evaluate():
        optimizer.zero_grad()
        loss = cross_entropy(replica(x, 0), y)
        loss.backward()
        return loss.detach()

    optimizer.step(evaluate)
    inside = ["forward", "/forward", "backward", "exchange", "/exchange", "/backward"]
    assert listener.told == ["update", *inside, "/update", "step 1"]


def fail(_gradient):
    raise KeyError("on purpose")


def test_phases_stay_balanced_when_something_fails(world, observed):
    replica, optimizer, listener = observed
    x, y = part(world)
    first = next(replica.model.parameters())
    hook = first.register_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        cross_entropy(replica.model(x, 0), y).backward()
    hook.remove()
    replica.zero_grad()
    assert listener.depth == 0
    for parameter in replica.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if world.size > 1:
        with pytest.raises(ConfigError, match="never averaged"):
            optimizer.step()
    assert listener.depth == 0
    replica.zero_grad()
    replica.learn(cross_entropy, x, 0, y)
    assert listener.depth == 0
    assert listener.told[-1] == "step 1"
