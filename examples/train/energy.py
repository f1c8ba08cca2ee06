"""Regression on an HDF5 file, for `hpctrain train`: see energy.toml.

`python examples/train/energy.py` writes the file: a smooth function of eight numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from torch import nn


def build(hidden: int = 64) -> nn.Module:
    """A network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(8, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1)
    )


def write(path: Path, num_samples: int, seed: int) -> None:
    """Write inputs and energies as two arrays of one file."""
    import h5py

    x = np.random.default_rng(seed).uniform(-1, 1, (num_samples, 8)).astype(np.float32)
    energy = np.sin(2 * x[:, :4]).sum(1) + (x[:, 4:] ** 2).sum(1)
    with h5py.File(path, "w") as file:
        file["x"] = x
        file["energy"] = energy[:, None].astype(np.float32)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    write(folder / "energy-train.h5", 4096, seed=1)
    write(folder / "energy-test.h5", 512, seed=2)
