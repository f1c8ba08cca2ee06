"""Norms, scaling and clipping of gradients in node-shared memory: each rank does its slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.fusion import cut_into_runs
from hpctrain.precision import multiply, sum_of_squares
from hpctrain.replica.node_memory import Room

if TYPE_CHECKING:
    from hpctrain.engines import Engine, NodeGroup
    from hpctrain.world import SharedBlock

__all__ = ["NodeNorms"]

_CPU = torch.device("cpu")


class NodeNorms:
    """What a treatment does to the sums of a node.

    A rank reads and writes its own slice alone, so nobody has to wait between the two; partial
    sums of squares meet in shared memory.
    """

    def __init__(self, engine: Engine, group: NodeGroup, rooms: Sequence[Room]) -> None:
        self._engine = engine
        self._group = group
        self._rooms = rooms
        self._block: SharedBlock | None = None
        self._partial = torch.empty(0)
        self._runs: tuple[frozenset[int], tuple[list[Tensor], list[Tensor]]] | None = None

    def norm_squared(self, excluded: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Collective: sums of squares without the excluded parameters, and of these."""
        if self._block is None:
            size = self._group.local_size
            self._block = self._group.allocate(2 * 8 * size, "norms of gradients")
            flat = self._block.tensor(torch.float64, start=0, num_elements=2 * size)
            self._partial = flat.view(size, 2)
        sums = [sum_of_squares(runs, _CPU) for runs in self._own_runs(excluded)]
        self._partial[self._group.local_rank] = torch.stack([s.double() for s in sums])
        self._wait("norms of gradients")
        total = self._partial.sum(0)
        if self._group.num_nodes > 1:  # slices are cut elsewhere there, and round otherwise
            self._engine.broadcast_(total, 0, what="norms of gradients")
        # In float64, whatever this rank's own slice holds: all ranks must go on with the same bits.
        kept, left = total.unbind()
        return kept, left

    def scale(self, factor: Tensor, excluded: frozenset[int], excluded_factor: Tensor) -> None:
        """Collective: multiply, the excluded parameters by a factor of their own."""
        if factor.item() == 1.0 and excluded_factor.item() == 1.0:
            return
        kept, left = self._own_runs(excluded)
        multiply(kept, factor)
        multiply(left, excluded_factor)
        self._wait("scaling of gradients")

    def clamp(self, limit: float, excluded: frozenset[int]) -> None:
        """Collective: limit each element's size, but for the excluded parameters."""
        for run in self._own_runs(excluded)[0]:
            run.clamp_(-limit, limit)
        self._wait("clipping of gradients")

    def close(self) -> None:
        """Let the memory go."""
        if self._block is not None:
            self._block.close()
            self._block = None

    def _wait(self, what: str) -> None:
        wait: Callable[[], object] = self._group.barrier.wait
        self._engine.meet(wait, what, "", None)

    def _own_runs(self, excluded: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
        if self._runs is None or self._runs[0] != excluded:
            found: tuple[list[Tensor], list[Tensor]] = ([], [])
            for run, is_apart in self._cut(excluded):
                found[is_apart].append(run)
            self._runs = (excluded, found)
        return self._runs[1]

    def _cut(self, excluded: frozenset[int]) -> Iterator[tuple[Tensor, bool]]:
        for room in self._rooms:
            own = self._group.own_slice(room.bucket.flags)
            for start, stop, is_apart in cut_into_runs(room.bucket, excluded):
                start, stop = max(start, own.start), min(stop, own.stop)
                if start < stop:
                    yield room.total[start:stop], is_apart
