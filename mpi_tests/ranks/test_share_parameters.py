"""`share_parameters=True`: a node holds the weights once, and users' habits stay right."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.replica.equal_ranks import digest

STEPS = 6


class Wide(nn.Module):
    """Parameters large enough to be divided between ranks, and small ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 100)
        self.out = nn.Linear(100, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.out(torch.tanh(self.first(x))) * self.scale


class Twice:
    """The same training on all ranks with shared weights, and alone."""

    def __init__(self, world, engines, kind="adamw", **options):
        self.world = world
        torch.manual_seed(3)
        self.model, self.alone = Wide().double(), Wide().double()
        self.alone.load_state_dict(self.model.state_dict())
        make = {
            "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True),
            "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9),
        }[kind]
        self.optimizer, self.own = make(self.model), make(self.alone)
        self.replica = hpc.distribute(
            world,
            self.model,
            self.optimizer,
            engine=engines["mpi"],
            share_parameters=True,
            **options,
        )

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(self.world.size, 5, 24, dtype=torch.float64, generator=generator)
        self.replica.backward(self.replica(x[self.world.rank]).square().mean())
        moved = self.replica.step()
        self.own.zero_grad()
        torch.stack([self.alone(part).square().mean() for part in x]).mean().backward()
        self.own.step()
        return moved

    def check(self):
        pairs = zip(self.model.named_parameters(), self.alone.parameters(), strict=True)
        for (name, mine), other in pairs:
            assert torch.allclose(mine, other, rtol=0, atol=1e-9), name
        assert len(set(self.world.comm.allgather(digest(self.model.parameters())))) == 1


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_equal_to_one_process(world, engines, kind):
    both = Twice(world, engines, kind)
    for number in range(STEPS):
        assert both.step(number)
        both.check()
    text = both.replica.describe()
    assert world.size == 1 or "shared by its ranks" in text
    both.replica.close()
    both.check()


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.mul_(0.5),
        lambda p: p.data.clamp_(-0.05, 0.05),
        lambda p: setattr(p, "data", p.data * 0.5),
        lambda p: p.detach().numpy().__imul__(0.5),
        lambda p: p.data.clamp_(-1e9, 1e9),
    ],
    ids=["in place", "data", "other memory", "numpy", "the same values"],
)
def test_editing_weights_after_a_step(world, engines, edit):
    both = Twice(world, engines)
    for number in range(STEPS):
        both.step(number)
        if number % 2:
            with torch.no_grad():
                for model in (both.model, both.alone):
                    edit(model.first.weight)
                    edit(model.out.bias)
        both.check()
    both.replica.close()


def test_reading_weights_between_backward_and_step(world, engines):
    both = Twice(world, engines)
    for number in range(3):
        both.step(number)
        x = torch.ones(2, 24, dtype=torch.float64)
        both.replica.backward(both.replica(x).sum())
        before = digest(both.model.parameters())
        if world.rank == 0:  # the others go on into the step meanwhile
            for _ in range(20):
                assert digest(both.model.parameters()) == before
        both.replica.step()
        both.own.zero_grad()
        both.alone(x).sum().backward()
        both.own.step()
    both.check()
    both.replica.close()


def test_loading_weights_and_going_on(world, engines):
    both = Twice(world, engines)
    both.step(0)
    saved = {key: value.clone() for key, value in both.model.state_dict().items()}
    both.step(1)
    both.model.load_state_dict(saved)
    both.alone.load_state_dict(saved)
    both.step(2)
    both.check()
    both.replica.close()


def test_a_graph_older_than_the_step_is_refused_by_autograd(world, engines):
    both = Twice(world, engines, "momentum")  # torch's own fused kernels count no writes
    x = torch.ones(2, 24, dtype=torch.float64)
    old = both.replica(x).sum()
    both.step(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(old, both.model.first.bias)
    both.replica.zero_grad()
    both.replica.close()


def test_ranks_that_run_dry(world, engines):
    both = Twice(world, engines)
    both.step(0)
    with both.replica.join():
        for _ in range(1 + world.rank):
            both.replica.backward(both.replica(torch.ones(2, 24, dtype=torch.float64)).sum())
            both.replica.step()
    assert len(set(world.comm.allgather(digest(both.model.parameters())))) == 1
    after = digest(both.model.parameters())
    both.replica.backward(both.replica(torch.ones(2, 24, dtype=torch.float64)).sum())
    both.replica.step()
    assert digest(both.model.parameters()) != after
    assert len(set(world.comm.allgather(digest(both.model.parameters())))) == 1
    both.replica.close()


def test_saving_a_part_writes_no_more_than_it(world, engines):
    both = Twice(world, engines)
    both.step(0)
    file = io.BytesIO()
    torch.save(both.model.out.bias, file)
    assert len(file.getvalue()) < 4000
    both.replica.close()


def test_weights_stay_after_the_block(world, engines):
    with hpc.init(seed=1, comm=world.comm, device="cpu", num_threads=1) as inner:
        torch.manual_seed(3)
        model = Wide()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        replica = hpc.distribute(inner, model, optimizer, engine="mpi", share_parameters=True)
        replica.backward(replica(torch.ones(2, 24)).sum())
        replica.step()
        expected = digest(model.parameters())
    assert digest(model.parameters()) == expected
    model(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    assert digest(model.parameters()) != expected


def test_what_cannot_be_shared_is_refused(world, engines):
    if world.size == 1:
        pytest.skip("one rank holds its weights once in any case")
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match="needs a sharded update"):
        hpc.distribute(
            world,
            model,
            optimizer,
            engine=engines["mpi"],
            update="replicated",
            share_parameters=True,
        )
