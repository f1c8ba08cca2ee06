"""What all examples of this folder train, and the same training on one process to compare with.

Only what divides the model differs from one example to the next.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import hpctrain as hpc

FEATURES, BATCH, EPOCHS, LR = 32, 25, 8, 3e-3


class Block(nn.Module):
    """A residual block, as transformers have them behind attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 64), nn.Linear(64, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the two layers make of it."""
        changed: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + changed


def net() -> nn.Module:
    """A chain of blocks, in float64 so that differences are rounding and nothing else."""
    return nn.Sequential(
        nn.Linear(8, FEATURES), *(Block() for _ in range(4)), nn.Linear(FEATURES, 1)
    ).double()


def points() -> tuple[Tensor, Tensor]:
    """The data: points, and a function of them. Batches of 25 give the ranks unequal shares."""
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.tanh(x.mean(1, keepdim=True))


def train_alone() -> nn.Module:
    """One process, plain torch: the same first weights, the same batches."""
    torch.manual_seed(3)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    x, y = points()
    for _ in range(EPOCHS):
        for one, target in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            mse_loss(model(one), target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def check(world: hpc.World, replica: hpc.Replica) -> None:
    """Collective: compare what was trained with one process; end with an error if it differs."""
    alone = train_alone()
    x, y = points()
    with torch.no_grad():
        found, expected = replica(x), alone(x)
    loss, worst = float(mse_loss(found, y)), float((found - expected).abs().max())
    first = float(y.square().mean())
    if loss > first / 2 or worst > 1e-11:
        raise SystemExit(f"loss {first:.3f} -> {loss:.3f}, off one process by {worst:.1e}")
    world.print(f"loss {first:.3f} -> {loss:.3f}; predictions within {worst:.0e} of one process")
