"""A small float64 model with what sharding has to survive, and what one process makes of it."""

from __future__ import annotations

import torch
from torch import nn

FEATURES, WIDTH = 6, 5


class Block(nn.Module):
    """`side` is used by even chunks only, `never` by none."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH, bias=False)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x, chunk):
        out = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out + self.side(x) if chunk % 2 == 0 else out


class Net(nn.Module):
    """Two blocks, and a weight that is used at both ends."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.leave = nn.Linear(WIDTH, FEATURES, bias=False)
        self.leave.weight = nn.Parameter(torch.randn(FEATURES, WIDTH))
        self.tied = nn.Linear(WIDTH, FEATURES)
        self.tied.weight = self.leave.weight

    def forward(self, x, chunk=0):
        out = self.enter(x)
        for block in self.blocks:
            out = block(out, chunk)
        return self.leave(out) * self.tied(self.frozen(out))


def build():
    torch.manual_seed(3)
    return Net().double()


def shares(size, number):
    """Rows of each rank in a batch; a rank has none now and then."""
    return [(rank + number) % 3 if size > 1 else 2 for rank in range(size)]


def batch(size, number):
    generator = torch.Generator().manual_seed(number)
    rows = shares(size, number)
    x = torch.randn(sum(rows), FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(sum(rows), FEATURES, generator=generator, dtype=torch.float64)
    return list(zip(x.split(rows), y.split(rows), strict=True))


def mse(out, target):
    return (out - target).square().mean()


def adamw(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, 0.01, weight_decay=0.01)


def train_alone(size, *, steps=4, accumulate=1, clip_norm=None, optimizer=adamw):
    """What one process makes of the same batches."""
    model = build()
    made = optimizer(model)
    for step in range(steps):
        made.zero_grad()
        parts = [
            (chunk, x, y)
            for number in range(step * accumulate, (step + 1) * accumulate)
            for chunk, (x, y) in enumerate(batch(size, number))
        ]
        total = sum(len(y) for _, _, y in parts)
        for chunk, x, y in parts:
            if len(y):
                (mse(model(x, chunk), y) * len(y) / total).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        made.step()
    return model


def train(world, replica, *, batches=4, first=0, explicit=False):
    done = []
    for number in range(first, first + batches):
        x, y = batch(world.size, number)[world.rank]
        if explicit:
            loss = mse(replica(x, world.rank), y)
            replica.backward(loss, num_samples=len(y))
            done.append(replica.step())
        else:
            done.append(replica.learn(mse, x, world.rank, y))
    return done


def whole(model):
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.state_dict().items()
    }


def assert_equal(model, alone, limit=1e-11):
    expected = alone.state_dict()
    found = whole(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max().item() <= limit, name
