"""The training steps that are measured: models of many equal layers, one batch, one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["WORKLOADS", "Workload"]

# Small enough that weights, and so the time of a step, stay what they are over a whole run;
# large enough that a missing exchange would show in the loss.
_RATE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, a batch and an optimizer."""

    width: int
    batch: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    layers: int = 20

    def model(self) -> nn.Module:
        """Linear layers with ReLU between them; equal on all ranks that have equal seeds.

        He's initialisation keeps signals and gradients of the deep stack at a normal size: torch's
        own lets them fade into denormal numbers, which are slow and would be measured instead.
        """
        parts: list[nn.Module] = []
        for _ in range(self.layers):
            linear = nn.Linear(self.width, self.width)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            nn.init.zeros_(linear.bias)
            parts += [linear, nn.ReLU()]
        return nn.Sequential(*parts[:-1])

    def data(self, rank: int) -> tuple[Tensor, Tensor]:
        """This rank's own batch and its targets."""
        generator = torch.Generator().manual_seed(1000 + rank)
        shape = (self.batch, self.width)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


WORKLOADS = {
    "256-sgd": Workload(
        width=256, batch=64, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=_RATE)
    ),
    "512-adamw": Workload(
        width=512, batch=16, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=_RATE)
    ),
    "512-adamw-fused": Workload(
        width=512,
        batch=16,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=_RATE, fused=True),
    ),
}
"""By name: 20 layers of that width (5 and 21 MB of gradients) and the optimizer."""
