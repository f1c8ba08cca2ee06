"""Tensor trains whose largest core is divided over ranks equal those that one process has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.errors import ConfigError
from mpi_tests.ranks.test_saver import common

WORDS, SIZE, CLASSES, STEPS, ROWS = 50, 14, 7, 4, 10
PATTERNS = {"embed": "cores", "*.small": "cores"}


class Classifier(nn.Module):
    """Rows of an embedding, a layer of each kind, and inputs that need a gradient in between."""

    def __init__(self):
        super().__init__()
        # Sizes with padding: 3 x 12 x 2 = 72 rows for 50 words, and 2 x 12 = 24 outputs for 20.
        self.embed = hpc.nn.TTEmbedding(
            WORDS, SIZE, padding_idx=0, ranks=3, row_factors=[3, 12, 2], column_factors=[2, 4, 2]
        )
        self.norm = nn.LayerNorm(SIZE)
        self.block = nn.ModuleDict(
            {
                "small": hpc.nn.TTLinear(SIZE, 20, ranks=4, in_factors=[4, 4], out_factors=[2, 12]),
                "dense": nn.Linear(20, SIZE),
            }
        )
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, words):
        x = self.norm(self.embed(words))
        x = x + self.block["dense"](torch.tanh(self.block["small"](x)))
        return self.head(x).flatten(0, 1)


def build():
    torch.manual_seed(3)
    return Classifier().double()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-2)


def batch(step):
    drawn = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (ROWS, 3), generator=drawn)
    return words, torch.randint(CLASSES, (ROWS, 3), generator=drawn)


def loss_fn(scores, target):
    return cross_entropy(scores, target.flatten())


def train_alone(steps=STEPS):
    model = build()
    optimizer = adamw(model)
    for step in range(steps):
        words, target = batch(step)
        optimizer.zero_grad()
        loss_fn(model(words), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return model


def train(replica, grid, steps):
    """Uneven shares of the batch; ranks of one data coordinate have the same."""
    for step in steps:
        cuts = [ROWS * (d + 1) // grid.data + (d == 0) for d in range(grid.data - 1)]
        words, target = (t.tensor_split(cuts)[grid.coordinate.data] for t in batch(step))
        assert replica.learn(loss_fn, words, target, num_samples=len(words)).moved


def divided(grid):
    model = hpc.split(grid, build(), tensor=PATTERNS)
    replica = hpc.distribute(grid.world, model, adamw(model), grid=grid, clip_norm=0.05)
    return model, replica


def whole(model):
    return {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t
        for name, t in model.state_dict().items()
    }


def assert_equal(model, alone):
    found = whole(model)
    for name, tensor in alone.state_dict().items():
        assert (found[name] - tensor).abs().max().item() <= 1e-11, name


def tensors(size):
    return [t for t in range(2, size + 1) if size % t == 0] or [1]


def test_equal_to_one_process(world):
    for tensor in tensors(world.size):
        with hpc.Grid(world, tensor=tensor) as grid:
            model, replica = divided(grid)
            train(replica, grid, range(STEPS))
            assert_equal(model, train_alone())
            if tensor > 1:
                for layer, core in ((model.embed, 1), (model.block["small"], 1)):
                    assert layer.largest_core == core
                    held = layer.cores[core].to_local().numel()
                    assert held * tensor == layer.cores[core].numel()
                dense = build().embed.to_dense()
                fresh, _ = divided(grid)
                assert torch.allclose(fresh.embed.to_dense(), dense, rtol=0, atol=1e-13)
            replica.close()


def test_numbers_out_of_range_are_refused(world):
    with hpc.Grid(world, tensor=world.size) as grid:
        _, replica = divided(grid)
        for odd in (WORDS, 71, -1):
            with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
                replica(torch.tensor([[odd]]))
        with torch.no_grad():
            assert replica(torch.zeros(1, 1, dtype=torch.long)).shape == (1, CLASSES)
        replica.close()


def test_a_checkpoint_goes_on_undivided_and_back(world, tmp_path):
    folder = common(world, tmp_path)
    with hpc.Grid(world, tensor=world.size) as grid:
        _, replica = divided(grid)
        saver = hpc.Saver(world, folder, replica, every_s=None)
        train(replica, grid, range(2))
        saver.save(wait=True)
        saver.close()
        replica.close()
    with hpc.Grid(world) as grid:
        model = build()
        replica = hpc.distribute(world, model, adamw(model), grid=grid, clip_norm=0.05)
        saver = hpc.Saver(world, folder, replica, every_s=None)
        assert saver.restore() is not None
        assert_equal(model, train_alone(2))
        train(replica, grid, range(2, 3))
        saver.save(wait=True)
        saver.close()
        replica.close()
    with hpc.Grid(world, tensor=world.size) as grid:
        model, replica = divided(grid)
        saver = hpc.Saver(world, folder, replica, every_s=None)
        assert saver.restore() is not None
        train(replica, grid, range(3, 4))
        assert_equal(model, train_alone())
        saver.close()
        replica.close()


def test_what_does_not_divide_is_refused(world):
    with hpc.Grid(world, tensor=world.size) as grid:
        odd = nn.Sequential(hpc.nn.TTLinear(9, 25, ranks=2, in_factors=[3, 3], out_factors=[5, 5]))
        if world.size > 1:
            with pytest.raises(ConfigError, match=r"0 has 5 rows in its largest core.*tensor=1 or"):
                hpc.split(grid, odd, tensor={"0": "cores"})
        with pytest.raises(ConfigError, match=r"is a TTLinear and cannot be 'column'"):
            hpc.split(grid, odd, tensor={"0": "column"})
        with pytest.raises(ConfigError, match=r"is a Linear and cannot be 'cores'"):
            hpc.split(grid, build(), tensor={"head": "cores"})
        with pytest.raises(ConfigError, match=r"shard='parameters' and 'cores' .* together"):
            hpc.split(grid, build(), tensor=PATTERNS, shard="parameters")
        tied = build()
        tied.block["small"].cores[0] = tied.embed.cores[0]
        with pytest.raises(ConfigError, match=r"are one tensor; untie them"):
            hpc.split(grid, tied, tensor=PATTERNS)
