"""Int8 weights after training: `python examples/int8.py`; needs scikit-learn and torchao.

Trains on the handwritten digits, makes a copy with int8 weights, and prints what that does to the
test accuracy.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc


def main() -> None:
    """Train, then quantise on rank 0."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
    test = torch.arange(len(x)) % 5 == 0
    with hpc.init(seed=7) as world:
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(world.device)
        replica = hpc.distribute(world, model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        mine = torch.arange(len(x))[~test][world.rank :: world.size]
        for _ in range(100):
            loss = cross_entropy(replica(x[mine].to(world.device)), y[mine].to(world.device))
            replica.backward(loss, num_samples=len(mine))
            replica.step()
        replica.close()

        @torch.no_grad()
        def accuracy(candidate: nn.Module) -> float:
            found = candidate(x[test].to(world.device)).argmax(1).cpu()
            return (found == y[test]).float().mean().item()

        if world.is_main:
            hpc.inference.quantize_int8(model, accuracy)


if __name__ == "__main__":
    main()
