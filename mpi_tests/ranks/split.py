"""Models large enough that parameters are cut between ranks, trained together and alone."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor, nn

import hpctrain as hpc
from hpctrain.replica.equal_ranks import digest

FEATURES = 64
STEPS = 4


class Split(nn.Module):
    """About 12,000 elements of every kind of parameter; cuts are at multiples of 1,024."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight  # tied
        self.scale = nn.Parameter(torch.tensor(1.5))  # of shape ()
        self.conv = nn.Conv2d(4, 40, 3)  # channels_last: not in the order of its indices
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.phase = nn.Parameter(torch.randn(FEATURES, 21, dtype=torch.complex128) * 0.3)
        self.turned = nn.Parameter(torch.randn(37, 61).t())  # transposed
        self.even, self.odd = nn.Linear(61, 37), nn.Linear(61, 37)
        self.never = nn.Linear(40, 40)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.out = nn.Linear(37, 1)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale
        seen = self.conv(hidden.view(len(x), 4, 4, 4)).mean((2, 3))
        waves = (hidden.to(torch.complex128) @ self.phase).abs()
        both = torch.cat([seen, waves], 1)
        turned = torch.tanh(both @ self.turned + self.nothing.sum())
        hidden = (self.odd if branch % 2 else self.even)(both)
        return self.out(torch.tanh(hidden + turned))


class Matrices(nn.Module):
    """Two dimensions everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 48, bias=False)
        self.second = nn.Linear(48, 33, bias=False)
        self.out = nn.Linear(33, 1, bias=False)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


def build(kind=Split):
    torch.manual_seed(11)
    return kind().double()


def chunk(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, FEATURES, dtype=torch.float64, generator=generator)


def groups(model):
    """Two groups with their own learning rate and decay."""
    parameters = list(model.parameters())
    half = len(parameters) // 2
    return [
        {"params": parameters[:half], "lr": 0.02},
        {"params": parameters[half:], "lr": 0.005, "weight_decay": 0.03},
    ]


class Twins:
    """The same training twice: on all ranks, and alone with the whole batch."""

    def __init__(self, world, engine, make, *, model=Split, **options):
        self.world, self.size = world, world.size
        self.model, self.alone = build(model), build(model)
        self.optimizer, self.own = make(self.model), make(self.alone)
        self.replica = hpc.distribute(world, self.model, self.optimizer, engine=engine, **options)

    @property
    def both(self):
        return ((self.model, self.optimizer), (self.alone, self.own))

    def backward(self, step):
        """Both backward passes; which branch is used changes with the step, not with the rank."""
        self.own.zero_grad()
        loss = self.replica(chunk(step, self.world.rank), step).square().mean()
        self.replica.backward(loss)
        for rank in range(self.size):
            (self.alone(chunk(step, rank), step).square().mean() / self.size).backward()

    def step(self, step):
        self.backward(step)
        assert self.replica.step()
        self.own.step()

    def train(self, steps=STEPS, start=0):
        for step in range(start, start + steps):
            self.step(step)

    def check(self, atol=1e-9):
        """Weights as alone, state as alone, and the same bits everywhere."""
        for (name, mine), other in zip(
            self.model.named_parameters(), self.alone.parameters(), strict=True
        ):
            assert torch.allclose(mine, other, rtol=0, atol=atol), name
        check_states(self.optimizer.state_dict(), self.own.state_dict(), atol)
        check_bits(self.world, [*self.model.parameters(), *tensors_of(self.optimizer)])
        self.replica.close()


def tensors_of(optimizer):
    states = optimizer.state_dict()["state"].values()
    return [v for state in states for _, v in sorted(state.items()) if torch.is_tensor(v)]


def check_bits(world, tensors):
    assert len(set(world.comm.allgather(digest(tensors)))) == 1


def check_states(mine, other, atol=1e-9):
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for index, values in other["state"].items():
        assert mine["state"][index].keys() == values.keys()
        for key, value in values.items():
            got = mine["state"][index][key]
            if not torch.is_tensor(value):
                assert got == value
                continue
            assert (got.shape, got.dtype) == (value.shape, value.dtype), (index, key)
            assert torch.allclose(got, value, rtol=1e-9, atol=atol), (index, key)


@contextmanager
def twins(world, engine, make, **options):
    made = Twins(world, engine, make, **options)
    yield made
    made.check()
