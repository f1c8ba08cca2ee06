"""Layers divided over the tensor dimension train as they do in one process, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import hpctrain as hpc
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.tensor_parallel import (
    average_gradients,
    clip_gradients,
    split_layers,
    vocabulary_cross_entropy,
)

STEPS, ROWS, TIME, WIDTH, WORDS = 4, 6, 5, 12, 24
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
        self.query, self.key, self.value = (nn.Linear(WIDTH, 24) for _ in range(3))
        self.out = nn.Linear(24, WIDTH)

    def forward(self, x):
        batch, time, _ = x.shape
        parts = (layer(x) for layer in (self.query, self.key, self.value))
        q, k, v = (part.view(batch, time, self.num_heads, -1).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, -1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(TIME, WIDTH))
        self.attention = Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))  # between divided layers: its gradient is partial
        self.unused = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.embed(words) + self.positions
        x = x * torch.linspace(0.9, 1.1, TIME, dtype=x.dtype).view(TIME, 1)  # a plain constant
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(torch.tanh(self.up(self.norms[1](x)) * self.gain))
        return self.head(x)


def build(seed=3):
    torch.manual_seed(seed)
    return Model().double()


def batch(step):
    drawn = torch.Generator().manual_seed(step)
    return [torch.randint(WORDS, (ROWS, TIME), generator=drawn) for _ in range(2)]


def alone(clip=None):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(STEPS):
        x, y = batch(step)
        cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.fixture
def make_grid(world):
    made = []

    def make(**sizes):
        made.append(hpc.Grid(world, timeout_s=60, **sizes))
        return made[-1]

    yield make
    for grid in made:
        grid.close()


def grids(size):
    """All factorings into data x tensor that divide layers."""
    divide = [t for t in range(2, size + 1) if size % t == 0] or [1]
    return [{"tensor": t, "data": size // t} for t in divide]


@pytest.mark.parametrize(("head", "clip"), [(None, None), ("vocabulary", 0.05)])
def test_equal_to_one_process(world, make_grid, head, clip):
    want = alone(clip)
    for sizes in grids(world.size):
        grid = make_grid(**sizes)
        patterns = {**PATTERNS, **({"head": head} if head else {})}
        model = split_layers(grid, build(seed=3 + world.rank), patterns)  # rank 0's weights
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(STEPS):
            # Uneven shares of the batch; the ranks of one data coordinate have the same.
            cuts = [ROWS * (d + 1) // grid.data + (d == 0) for d in range(grid.data - 1)]
            x, y = (t.tensor_split(cuts)[grid.coordinate.data] for t in batch(step))
            scores = model(x)
            if head:
                loss = vocabulary_cross_entropy(scores, y)
            else:
                loss = cross_entropy(scores.flatten(0, 1), y.flatten())
            loss.backward()
            average_gradients(grid, model, weight=len(y))
            if clip is not None:
                clip_gradients(grid, model, clip)
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            apart = (parameter.full_tensor() - want[name]).abs().max()
            assert float(apart.detach()) <= 1e-11, (sizes, name)
        grid.close()


def test_scores_that_stay_divided(world, make_grid):
    grid = make_grid(tensor=world.size)
    model = split_layers(grid, build(), {"head": "vocabulary"})
    x, y = batch(0)
    y[0, :3] = -100
    scores = model(x)
    assert scores.to_local().shape[-1] == WORDS // world.size
    whole = scores.full_tensor().detach()
    for reduction in ("mean", "sum", "none"):
        want = cross_entropy(whole.flatten(0, 1), y.flatten(), reduction=reduction)
        got = vocabulary_cross_entropy(scores, y, reduction=reduction)
        assert torch.allclose(got.reshape(-1), want.reshape(-1), rtol=0, atol=1e-13)
    with pytest.raises(ConfigError, match=f"targets must be within {WORDS} classes"):
        vocabulary_cross_entropy(scores, y + WORDS)


def test_different_batches_are_refused(world, make_grid):
    grid = make_grid(tensor=world.size)
    model = split_layers(grid, build(), PATTERNS)
    x, _ = batch(0)
    x[0, 0] = (x[0, 0] + world.rank) % WORDS
    if world.size == 1:
        model(x)
        return
    with pytest.raises(CollectiveError, match="given different batches"):
        model(x)


def test_refused_on_all_ranks(world, make_grid):
    grid = make_grid(tensor=world.size)
    with pytest.raises(ConfigError, match="matches no linear or embedding layer"):
        split_layers(grid, build(), {"*.nothing": "row"} if world.rank == 0 else PATTERNS)
