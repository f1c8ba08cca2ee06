"""A rank's side of `barrier`: work, then wait for the others, in one of several ways."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.barrier import CASES
from hpctrain.bench import Measurable
from hpctrain.world import World
from hpctrain.world.barrier import make_barrier

__all__ = ["make"]

# One or two milliseconds of a core: longer than a barrier, shorter than a scheduler's time slice.
_WIDTH = 192
_PRODUCTS = 4


class Waiting:
    """Work as the case says, then `wait`."""

    def __init__(self, world: World, wait: Callable[[], None]) -> None:
        self.world = world
        self.wait = wait
        self.works = False
        self.matrix = torch.eye(_WIDTH)
        self.product = torch.empty_like(self.matrix)

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: see who works."""
        self.works = case == CASES[2] or (case == CASES[1] and self.world.rank == 0)
        self.run(2)
        return {}

    def run(self, repeats: int) -> None:
        """Collective: work and wait."""
        for _ in range(repeats):
            if self.works:
                for _ in range(_PRODUCTS):
                    torch.mm(self.matrix, self.matrix, out=self.product)
            self.wait()

    def counts(self) -> dict[str, int]:
        """Nothing: one repeat is one barrier."""
        return {}

    def finish(self) -> dict[str, object]:
        """Nothing is left."""
        return {}


def make(world: World, variant: str) -> Measurable:
    """The subject of a variant: a kind and a number of ranks."""
    kind = variant.rpartition("-")[0]
    if kind == "nobody-waits":
        return Waiting(world, lambda: None)
    if kind == "mpi":
        return Waiting(world, world.comm.Barrier)
    barrier = make_barrier(world.comm, world.node, sleep=kind == "sleeping")
    world.at_exit(barrier.close)
    return Waiting(world, barrier.wait)
