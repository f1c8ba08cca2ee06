"""A float64 model with what divided layers have to survive, and what one process makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

import hpctrain as hpc
from hpctrain.tensor_parallel import vocabulary_cross_entropy

STEPS, ROWS, TIME, WIDTH, WORDS = 2, 6, 5, 12, 24
PATTERNS = {
    "*.up": "column",
    "*.down": "row",
    "*.query": "column",
    "*.key": "column",
    "*.value": "column",
    "*.out": "row",
    "*.embed": "vocabulary",
}


class Attention(nn.Module):
    """As for one process: it does not know that its layers are divided."""

    def __init__(self):
        super().__init__()
        self.num_heads = 12
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.key = nn.Linear(WIDTH, 24, bias=False)  # a bias would have rounding for a gradient
        self.out = nn.Linear(24, WIDTH)

    def forward(self, x):
        batch, time, _ = x.shape
        normed = self.norm(x)
        parts = (layer(normed) for layer in (self.query, self.key, self.value))
        q, k, v = (part.view(batch, time, self.num_heads, -1).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, time, -1))


class Model(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(TIME, WIDTH))
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))  # between divided layers: its gradient is partial
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH).requires_grad_(False)})
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, TIME).view(TIME, 1))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words):
        x = (self.embed(words) + self.positions) * self.scale.to(self.positions.dtype)
        x = x * torch.linspace(0.9, 1.1, TIME, dtype=x.dtype).view(TIME, 1)  # a plain constant
        x = self.attention(x) + self.frozen["up"](x)
        x = x + self.down(torch.tanh(self.up(self.norm(x)) * self.gain))
        return self.head(x)


def build(seed=3, **options):
    torch.manual_seed(seed)
    return Model(**options).double()


def batch(step):
    drawn = torch.Generator().manual_seed(step)
    return [torch.randint(WORDS, (ROWS, TIME), generator=drawn) for _ in range(2)]


def mine(grid, step):
    """Uneven shares of the batch; the ranks of one data coordinate have the same."""
    cuts = [ROWS * (d + 1) // grid.data + (d == 0) for d in range(grid.data - 1)]
    return (part.tensor_split(cuts)[grid.coordinate.data] for part in batch(step))


def words_loss(scores, y):
    return vocabulary_cross_entropy(scores, y)


def alone(*, clip=None, clip_value=None, accumulate=1, **options):
    model = build(**options)
    optimizer = adamw(model)
    for step in range(STEPS):
        for number in range(accumulate):
            x, y = batch(step * accumulate + number)
            (cross_entropy(model(x).flatten(0, 1), y.flatten()) / accumulate).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        optimizer.zero_grad()
    return model


def adamw(model):
    """`unused` would decay if it had a gradient."""
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


@pytest.fixture(name="make_grid")
def grid_factory(world):
    made = []

    def make(**sizes):
        made.append(hpc.Grid(world, timeout_s=60, **sizes))
        return made[-1]

    yield make
    for grid in made:
        grid.close()


def grids(size):
    """All factorings into data x tensor that divide layers, and the one that does not."""
    return [{"tensor": t, "data": size // t} for t in range(1, size + 1) if size % t == 0]


def assert_equal(model, want, limit=1e-11):
    expected = dict(want.named_parameters())
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        apart = (whole - expected.pop(name)).abs().max()
        assert float(apart.detach()) <= limit, name
    assert not expected


class Small(nn.Module):
    """One divided pair of layers, with what may be dropped or left out."""

    def __init__(self, *, drop=0.0, inside=0.0):
        super().__init__()
        self.drop, self.inside = drop, inside
        self.up, self.down = nn.Linear(4, 24), nn.Linear(24, 4)

    def forward(self, x):
        hidden = dropout(self.up(x), self.inside, self.training)
        return dropout(self.down(torch.tanh(hidden)), self.drop, self.training)


SMALL = {"up": "column", "down": "row"}


def small(seed=5, **options):
    torch.manual_seed(seed)
    return Small(**options).double()


def rows(number, count=2):
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(count, 4, generator=drawn, dtype=torch.float64)


def mse(out, target):
    return (out - target).square().mean()
