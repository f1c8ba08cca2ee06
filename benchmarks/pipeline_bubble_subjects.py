"""A rank's side of `pipeline_bubble`: a stage that sleeps where another would compute."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipeline_bubble import BACKWARD_S, FORWARD_S
from hpctrain.bench import Measurable
from hpctrain.grid import Grid
from hpctrain.pipeline import PipelineRunner, cut_model
from hpctrain.world import World

__all__ = ["make"]

_FEATURES = 8


class _Sleep(torch.autograd.Function):
    """Takes as long as it was told to, in both directions."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """Sleep."""
        time.sleep(FORWARD_S)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Sleep longer."""
        time.sleep(BACKWARD_S)
        return gradient.clone()


class Sleeping(nn.Module):
    """A stage of known duration."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(_FEATURES))

    def forward(self, value: Tensor) -> Tensor:
        """Sleep, with a parameter before it so that there is always a backward pass."""
        slept: Tensor = _Sleep.apply(value * self.scale)
        return slept


class Pipeline:
    """Steps of a pipeline; `alone` sleeps as long as one of its stages works."""

    def __init__(self, world: World, kind: str, grid: Grid) -> None:
        self.world = world
        self.kind = kind
        self.micro_batches = 1
        self.runner: PipelineRunner | None = None
        self.grid = grid

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: a pipeline of so many micro-batches."""
        self.micro_batches = int(case.split()[0])
        if self.kind != "alone":
            stage = cut_model(self.grid, [Sleeping() for _ in range(self.world.size)])
            self.runner = PipelineRunner(
                self.grid, stage, micro_batches=self.micro_batches, schedule=self.kind
            )
        self.run(1)
        return {}

    def run(self, repeats: int) -> None:
        """Collective: so many steps."""
        rows = torch.ones(self.micro_batches, _FEATURES)
        for _ in range(repeats):
            if self.runner is None:
                time.sleep(self.micro_batches * (FORWARD_S + BACKWARD_S))
            else:
                self.runner.forward_backward(nn.functional.mse_loss, (rows,), rows)

    def counts(self) -> dict[str, int]:
        """One repeat is one step."""
        return {}

    def finish(self) -> dict[str, object]:
        """Collective: let the pipeline go."""
        if self.runner is not None:
            self.runner.close()
        return {}


_grids: dict[World, Grid] = {}


def make(world: World, variant: str) -> Measurable:
    """Collective: the subject of a variant, a kind and a number of stages, on one grid for all."""
    if world not in _grids:
        _grids[world] = Grid(world, pipeline=world.size)  # the world's end closes it
    return Pipeline(world, variant.rpartition("-")[0], _grids[world])
