"""The training steps that are measured: a model, a batch and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["NODE_WORKLOADS", "WORKLOADS", "Workload", "find"]

# Small enough that weights, and so the time of a step, stay what they are over a whole run;
# large enough that a missing exchange would show in the loss.
_RATE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, a batch and an optimizer."""

    build: Callable[[], nn.Module]
    """Makes the model; equal on all ranks that have equal seeds."""
    inputs: tuple[int, ...]
    """The shape of one sample."""
    targets: tuple[int, ...]
    """The shape of what the model makes of it."""
    batch: int
    """Samples a rank, or of all ranks together."""
    whole_batch: bool = False
    """Whether the ranks divide the batch, instead of having one each."""
    optimizer_class: type[torch.optim.Optimizer]
    options: Mapping[str, object]

    def model(self) -> nn.Module:
        """A new model."""
        return self.build()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A new optimizer over all of the model's parameters."""
        return self.optimizer_class(model.parameters(), **dict[str, Any](self.options))

    def data(self, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """This rank's samples and their targets."""
        if not self.whole_batch:
            return self._draw(1000 + rank)
        x, y = self._draw(1000)
        return x.chunk(num_ranks)[rank].clone(), y.chunk(num_ranks)[rank].clone()

    def _draw(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return (
            torch.randn((self.batch, *self.inputs), generator=generator),
            torch.randn((self.batch, *self.targets), generator=generator),
        )


def _linears(width: int, layers: int = 20) -> nn.Module:
    """Linear layers with ReLU between them.

    He's initialisation keeps signals and gradients of the deep stack at a normal size: torch's
    own lets them fade into denormal numbers, which are slow and would be measured instead.
    """
    parts: list[nn.Module] = []
    for _ in range(layers):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        parts += [linear, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _transformer(dropout: float) -> nn.Module:
    """Four encoder layers, 256 wide with 8 heads, the hidden layer four times as wide."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def _cnn() -> nn.Module:
    """Five convolutions of 3 x 3 with BatchNorm and ReLU, halved twice on the way, ten outputs."""
    parts: list[nn.Module] = []
    for number, (come, go) in enumerate(pairwise((3, 32, 64, 64, 128, 128))):
        parts += [nn.Conv2d(come, go, 3, padding=1, bias=False), nn.BatchNorm2d(go), nn.ReLU()]
        if number in (1, 3):
            parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


_ADAMW: dict[str, Any] = {"optimizer_class": torch.optim.AdamW, "options": {"lr": _RATE}}
_FUSED: dict[str, Any] = {
    "optimizer_class": torch.optim.AdamW,
    "options": {"lr": _RATE, "fused": True},
}
_WIDE: dict[str, Any] = {"build": lambda: _linears(512), "inputs": (512,), "targets": (512,)}
_TOKENS: dict[str, Any] = {
    "inputs": (32, 256),
    "targets": (32, 256),
    "batch": 64,
    "whole_batch": True,
    **_FUSED,
}

WORKLOADS = {
    "256-sgd": Workload(
        build=lambda: _linears(256),
        inputs=(256,),
        targets=(256,),
        batch=64,
        optimizer_class=torch.optim.SGD,
        options={"lr": _RATE},
    ),
    "512-adamw": Workload(batch=16, **_WIDE, **_ADAMW),
    "512-adamw-fused": Workload(batch=16, **_WIDE, **_FUSED),
}
"""By name: 20 layers of that width (5 and 21 MB of gradients) and the optimizer; a batch a rank."""

NODE_WORKLOADS = {
    "small": Workload(
        build=lambda: _linears(64, 4),
        inputs=(64,),
        targets=(64,),
        batch=32,
        whole_batch=True,
        **_FUSED,
    ),
    "mlp": Workload(batch=256, whole_batch=True, **_WIDE, **_FUSED),
    "transformer": Workload(build=lambda: _transformer(0.0), **_TOKENS),
    "transformer-dropout": Workload(build=lambda: _transformer(0.1), **_TOKENS),
    "cnn": Workload(
        build=_cnn, inputs=(3, 32, 32), targets=(10,), batch=128, whole_batch=True, **_FUSED
    ),
}
"""By name: one batch that the ranks of a node divide; `small` is there to be quick."""


def find(name: str) -> Workload:
    """The workload of that name."""
    return {**WORKLOADS, **NODE_WORKLOADS}[name]
