"""A rank's side of `tensor_step`: four blocks whose layers are divided over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hpctrain as hpc
from benchmarks.tensor_step import CASES
from hpctrain.bench import Measurable
from hpctrain.errors import CollectiveError
from hpctrain.world import World

__all__ = ["Blocks", "make"]

_SEED = 5
_ROWS, _NUM_BLOCKS = 16, 4
_FIRST_STEPS = 3
_RATE = 1e-4


class Block(nn.Module):
    """Wider inside, with a way around."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One sum over the ranks, and in the backward pass one."""
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Blocks(nn.Sequential):
    """As for one process."""

    def __init__(self, width: int) -> None:
        super().__init__(*(Block(width) for _ in range(_NUM_BLOCKS)))


class Whole:
    """The model on every rank, and no communication at all."""

    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: build model and optimizer, and take the first steps, which are slow."""
        torch.manual_seed(_SEED)
        width = CASES[case]
        self.model: nn.Module = Blocks(width)
        self.x = torch.randn(_ROWS, width)
        self.y = torch.randn(_ROWS, width)
        self.divide()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), _RATE, fused=True)
        self.distribute()
        self.first_loss = self.loss()
        self.run(_FIRST_STEPS)
        return {}

    def divide(self) -> None:
        """Collective: divide layers over the ranks; here each has all of them."""

    def distribute(self) -> None:
        """Collective: let the ranks train together; here they do not."""

    def step(self) -> None:
        """Collective where layers are divided: one training step."""
        self.optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(self.model(self.x), self.y))
        self.optimizer.step()

    def run(self, repeats: int) -> None:
        """Take steps."""
        for _ in range(repeats):
            self.step()

    def loss(self) -> float:
        """Collective where layers are divided."""
        with torch.no_grad():
            return nn.functional.mse_loss(self.model(self.x), self.y).item()

    def counts(self) -> dict[str, int]:
        """Nothing is counted in other people's software."""
        return {}

    def finish(self) -> dict[str, object]:
        """Collective: the loss, which ranks must share, and let the memory go.

        Raises:
            CollectiveError: it did not fall, so that the speed is of no interest.
        """
        loss = self.loss()
        if not loss < self.first_loss:
            raise CollectiveError(f"the loss went from {self.first_loss} to {loss}")
        self.release()
        return {"loss": round(loss, 6)}

    def release(self) -> None:
        """Let the model go."""
        del self.model, self.optimizer


class Divided(Whole):
    """torch's own parallelize_module over a mesh of either backend."""

    def __init__(self, world: World, *, over_gloo: bool) -> None:
        super().__init__(world)
        self.over_gloo = over_gloo

    def mesh(self) -> Any:
        """Collective at the first call: all ranks."""
        return _gloo_mesh(self.world) if self.over_gloo else _grid_of(self.world).mesh("tensor")

    def divide(self) -> None:
        """Collective: cut the layers."""
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        parallelize_module(self.model, self.mesh(), plan)  # type: ignore[arg-type]


class Sums(Divided):
    """What a step sums over the ranks, and nothing else."""

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: make the tensor."""
        self.group = self.mesh().get_group()
        self.tensor = torch.ones(_ROWS, CASES[case])
        self.run(_FIRST_STEPS)
        return {}

    def step(self) -> None:
        """Collective: one sum a block in the forward pass, and one in the backward pass."""
        for _ in range(2 * _NUM_BLOCKS):
            dist.all_reduce(self.tensor, group=self.group)
        self.tensor.fill_(1.0)

    def finish(self) -> dict[str, object]:
        """Collective: see that sums are right.

        Raises:
            CollectiveError: they are not.
        """
        dist.all_reduce(self.tensor, group=self.group)
        if not bool((self.tensor == self.world.size).all()):
            raise CollectiveError(f"the sum of ones is {self.tensor.flatten()[0]}")
        return {}


class Split(Whole):
    """`hpctrain.split(tensor=...)`, with what it checks."""

    replica: hpc.Replica

    def divide(self) -> None:
        """Collective: cut the layers."""
        patterns = {"*.up": "column", "*.down": "row"}
        self.model = hpc.split(_grid_of(self.world), self.model, tensor=patterns)

    def distribute(self) -> None:
        """Collective: make the replica."""
        grid = _grid_of(self.world)
        self.replica = hpc.distribute(self.world, self.model, self.optimizer, grid=grid)

    def step(self) -> None:
        """Collective: one training step."""
        self.replica.learn(nn.functional.mse_loss, self.x, self.y)

    def release(self) -> None:
        """Let the model go."""
        self.replica.close()
        del self.replica
        super().release()


_grids: dict[World, hpc.Grid] = {}
_meshes: dict[World, Any] = {}


def _grid_of(world: World) -> hpc.Grid:
    if world not in _grids:
        _grids[world] = hpc.Grid(world, tensor=world.size)  # the world's end closes it
    return _grids[world]


def _gloo_mesh(world: World) -> Any:
    if world not in _meshes:
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("gloo")
        world.at_exit(dist.destroy_process_group)
        _meshes[world] = init_device_mesh("cpu", (world.size,))
    return _meshes[world]


_MAKERS: dict[str, Callable[[World], Measurable]] = {
    "compute": Whole,
    "hpctrain": lambda world: Divided(world, over_gloo=False),
    "hpctrain-split": Split,
    "gloo": lambda world: Divided(world, over_gloo=True),
    "sums": lambda world: Sums(world, over_gloo=False),
    "gloo-sums": lambda world: Sums(world, over_gloo=True),
}


def make(world: World, variant: str) -> Measurable:
    """Collective: the subject of a variant."""
    return _MAKERS[variant](world)
