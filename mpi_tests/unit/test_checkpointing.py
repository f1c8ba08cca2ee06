"""Activation checkpointing by module name: the same bits, fewer bytes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import hpctrain as hpc


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)

    def forward(self, x, *, scale=1.0):
        return x + self.drop(self.mlp(self.norm(x))) * scale


class Net(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.out(x).square().mean()


def make():
    torch.manual_seed(0)
    return Net()


def train(model, steps=3):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).backward()
        optimizer.step()
    return model.state_dict()


def test_results_are_the_same_bits_with_dropout_and_running_statistics():
    plain, checkpointed = make(), make()
    done = hpc.optim.checkpoint_activations(checkpointed, "blocks.*")
    assert done.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    expected, state = train(plain), train(checkpointed)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_what_it_saves_is_measured_and_leaves_no_trace():
    model = make()
    done = hpc.optim.checkpoint_activations(model, "blocks.0", "blocks.2.mlp")
    x = torch.randn(64, 16)
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    found = done.measure(lambda: model(x))
    assert found.num_modules == 2
    # Of block 0 its input stays: it is x. At least both hidden layers, before and after GELU, go.
    hidden = 64 * 64 * 4
    assert found.saved_bytes >= 4 * hidden - 64 * 16 * 4
    assert 0 < found.with_bytes < found.without_bytes
    assert "KiB with 2 modules checkpointed" in str(found)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())
    done.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_bytes_are_counted_exactly():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()), nn.Tanh())
    done = hpc.optim.checkpoint_activations(model, "0")
    x = torch.randn(32, 8)
    found = done.measure(lambda: model(x).sum())
    one = 32 * 8 * 4
    assert found.without_bytes == 4 * one  # x for the weight's gradient, and three results of tanh
    assert found.with_bytes == 2 * one  # x, and the last tanh


def test_copies_and_files_work():
    model = make()
    hpc.optim.checkpoint_activations(model, "blocks.*")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.blocks[0].mlp[0].weight.zero_()
    assert twin.blocks[0].forward.__self__ is twin.blocks[0]
    expected, state = train(make()), train(twin)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.eval(), model.eval()
    x = torch.randn(2, 16)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["layers.*"], r"pattern 'layers.\*' matches no module; there are blocks, blocks.0"),
        (["*"], None),
        ([], "no pattern is given"),
        (["blocks.*", "blocks.*.mlp"], r"blocks.0.mlp is inside blocks.0"),
    ],
)
def test_patterns(patterns, message):
    model = make()
    if message is None:  # of modules within each other the outermost
        assert hpc.optim.checkpoint_activations(model, *patterns).names == ("blocks", "out")
        with pytest.raises(hpc.errors.ConfigError, match="out already has a custom forward"):
            hpc.optim.checkpoint_activations(model, "out")
        return
    with pytest.raises(hpc.errors.ConfigError, match=message):
        hpc.optim.checkpoint_activations(model, *patterns)
