"""A rank's side of `gathering`: one collective of an engine, or a copy of what allgather gives."""

from __future__ import annotations

from collections.abc import Callable

import torch

import hpctrain as hpc
from hpctrain.bench import Measurable
from hpctrain.engines import Engine
from hpctrain.errors import CollectiveError
from hpctrain.world import World

__all__ = ["make_maker"]


class Gathering:
    """A collective of an engine by its name; without an engine, the copy.

    Args:
        world: The ranks.
        engine: What is measured.
        num_bytes: What each rank gives.
    """

    def __init__(self, world: World, engine: Engine | None, num_bytes: int) -> None:
        self.size = world.size
        self.rank = world.rank
        self.engine = engine
        self.count = num_bytes // 4
        self.call: Callable[[], object] | None = None

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: check the values, and touch the memory, so that it exists.

        Raises:
            CollectiveError: the engine gives wrong values, so its speed is of no interest.
        """
        output = torch.ones(self.size * self.count)
        if self.engine is None:
            given = torch.zeros_like(output)
            self.call = lambda: output.copy_(given)
            return {}
        engine, own = self.engine, torch.full((self.count,), float(self.rank))
        if case == "reduce_scatter":
            right = engine.reduce_scatter(own) == sum(range(self.size))
            self.call = lambda: engine.reduce_scatter(own)
        else:
            engine.allgather_into(output, own)
            right = output.view(self.size, -1) == torch.arange(self.size)[:, None]
            into = case == "allgather_into"
            self.call = lambda: (
                engine.allgather_into(output, own) if into else engine.allgather(own)
            )
        if not bool(right.all()):
            raise CollectiveError(f"{engine.name}: {case} gives wrong values")
        return {}

    def run(self, repeats: int) -> None:
        """Collective."""
        if self.call is None:
            raise RuntimeError("prepare() comes first")
        for _ in range(repeats):
            self.call()

    def counts(self) -> dict[str, int]:
        """Nothing: one repeat is one collective."""
        return {}

    def finish(self) -> dict[str, object]:
        """Let the memory go."""
        self.call = None
        return {}


def make_maker(num_bytes: int) -> Callable[[World, str], Measurable]:
    """What makes the subject of a variant."""

    def make(world: World, variant: str) -> Measurable:
        engine = None if variant == "memcpy" else hpc.connect(world, variant).engine
        return Gathering(world, engine, num_bytes)

    return make
