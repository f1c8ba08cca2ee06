"""Handwritten digits for `hpctrain train`: see digits_mlp.toml and digits_cnn.toml."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

_TEST_EVERY = 5


def train(flat: bool = True) -> tuple[Tensor, Tensor]:
    """Four of five of the 1,797 digits that ship with scikit-learn."""
    return _digits(flat, test=False)


def held_out(flat: bool = True) -> tuple[Tensor, Tensor]:
    """The fifth that is kept for testing."""
    return _digits(flat, test=True)


def _digits(flat: bool, *, test: bool) -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    chosen = (torch.arange(len(labels)) % _TEST_EVERY == 0) == test
    x = torch.tensor(images, dtype=torch.float32)[chosen] / 16.0
    return (x if flat else x.view(-1, 1, 8, 8)), torch.tensor(labels)[chosen]


def mlp(hidden: int = 128, dropout: float = 0.2) -> nn.Module:
    """A network with one hidden layer."""
    return nn.Sequential(
        nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10)
    )


def cnn(channels: int = 16) -> nn.Module:
    """Two convolutions with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * channels, 10),
    )
