"""A rank's side of `collectives`: allreduce on an engine, and one copy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import hpctrain as hpc
from hpctrain.bench.command import parse_size
from hpctrain.bench.worker import Measurable
from hpctrain.engines import Engine, Op
from hpctrain.errors import CollectiveError
from hpctrain.world import World

__all__ = ["make_maker"]


class Allreduce:
    """`engine.allreduce_` of float32, in place.

    Args:
        engine: What is measured.
        allocated: Whether the engine allocates the buffer, or torch does.
    """

    def __init__(self, engine: Engine, *, allocated: bool) -> None:
        self.engine = engine
        self.allocated = allocated
        self.buffer: Tensor | None = None

    def prepare(self, case: str) -> dict[str, object]:
        """Collective: check that the sum is correct, then continue with zeros, which do not change.

        Raises:
            CollectiveError: the engine sums wrongly, so its speed is of no interest.
        """
        count = parse_size(case) // 4
        self.buffer = self.engine.allocate(count) if self.allocated else torch.empty(count)
        self.buffer.fill_(1.0)
        self.engine.allreduce_(self.buffer, Op.SUM)
        if not bool((self.buffer == self.engine.size).all()):
            raise CollectiveError(f"{self.engine.name}: the sum of ones is wrong at {case}")
        self.buffer.zero_()
        return {}

    def run(self, repeats: int) -> None:
        """Collective: sum over all ranks."""
        if self.buffer is None:
            raise RuntimeError("prepare() comes first")
        for _ in range(repeats):
            self.engine.allreduce_(self.buffer, Op.SUM)

    def counts(self) -> dict[str, int]:
        """Nothing: one repeat is one collective."""
        return {}

    def finish(self) -> dict[str, object]:
        """Let the memory go."""
        self.buffer = None
        return {}


class Memcpy:
    """One copy, on all ranks at the same time, as they share the memory's bandwidth."""

    def __init__(self) -> None:
        self.source: Tensor | None = None
        self.target: Tensor | None = None

    def prepare(self, case: str) -> dict[str, object]:
        """Touch the memory, so that it exists."""
        self.source = torch.ones(parse_size(case) // 4)
        self.target = torch.zeros_like(self.source).fill_(2.0)
        return {}

    def run(self, repeats: int) -> None:
        """Copy."""
        if self.source is None or self.target is None:
            raise RuntimeError("prepare() comes first")
        for _ in range(repeats):
            self.target.copy_(self.source)

    def counts(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def finish(self) -> dict[str, object]:
        """Let the memory go."""
        self.source = self.target = None
        return {}


def make_maker() -> Callable[[World, str], Measurable]:
    """What makes the subject of a variant; variants of a launch share its engine."""
    engines: dict[str, Engine] = {}

    def make(world: World, variant: str) -> Measurable:
        if variant == "memcpy":
            return Memcpy()
        name = variant.removesuffix("-allocated")
        if name not in engines:
            engines[name] = hpc.connect(world, name).engine
        return Allreduce(engines[name], allocated=variant != name)

    return make
