"""A rank's side of `barrier`: work, then wait for the others, in one of several ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpctrain.bench import Measurable
from hpctrain.world import World
from hpctrain.world.barrier import make_barrier

__all__ = ["make_maker"]

# One or two milliseconds of a core: longer than a barrier, shorter than a scheduler's time slice.
_WIDTH = 192
_PRODUCTS = 4


class Waiting:
    """Work as the case says, then `wait`."""

    def __init__(self, world: World, cases: Sequence[str], wait: Callable[[], None]) -> None:
        self.world = world
        self.cases = cases
        self.wait = wait
        self.works = False
        self.matrix = torch.eye(_WIDTH)
        self.product = torch.empty_like(self.matrix)

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: see who works."""
        _, one_works, all_work = self.cases
        self.works = case == all_work or (case == one_works and self.world.rank == 0)
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


def make_maker(cases: Sequence[str]) -> Callable[[World, str], Measurable]:
    """What makes the subject of a variant: a kind and a number of ranks.

    Args:
        cases: Names of the cases where no rank, one rank and all ranks work.
    """

    def make(world: World, variant: str) -> Measurable:
        kind = variant.rpartition("-")[0]
        if kind == "nobody-waits":
            return Waiting(world, cases, lambda: None)
        if kind == "mpi":
            return Waiting(world, cases, world.comm.Barrier)
        barrier = make_barrier(world.comm, world.node, sleep=kind == "sleeping")
        world.at_exit(barrier.close)
        return Waiting(world, cases, barrier.wait)

    return make
