"""The slice of all gradients that this rank adds up, cut so that its own need not be copied.

Nobody else reads this rank's part of its own slice. A gradient that lies in it as a whole is
therefore added from where torch has put it, and never written to shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.update import flat_memory

if TYPE_CHECKING:
    from hpctrain.engines import NodeGroup
    from hpctrain.replica.node_memory import Room

__all__ = ["NodeSums"]

_DIRECT_FROM_BYTES = 32 << 10
"""A smaller gradient is copied with all others: one more sum would cost more than it spares."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A stretch of this rank's slice."""

    terms: list[Tensor]
    """Every rank's part of it, by local rank."""
    total: Tensor
    member: int | None
    """The parameter whose whole gradient it is, where it can be added from torch's own memory."""


class NodeSums:
    """Adds up what the ranks of a node have written.

    Args:
        group: The ranks.
        rooms: Where gradients meet, one for each dtype.
    """

    def __init__(self, group: NodeGroup, rooms: Sequence[Room]) -> None:
        self._group = group
        self._rooms = [(room, list(_cut(group, room))) for room in rooms]
        self._slots = {
            run.member: room.slots[room.bucket.members.index(run.member)]
            for room, runs in self._rooms
            for run in runs
            if run.member is not None
        }

    @property
    def members(self) -> AbstractSet[int]:
        """The parameters whose gradients may stay where torch has put them."""
        return self._slots.keys()

    def direct(self, gradients: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """The gradients that need not be copied, by parameter, each in the order of its slot."""
        found: dict[int, Tensor] = {}
        for index, slot in self._slots.items():
            gradient = gradients[index]
            if (
                gradient is not None
                and gradient.layout is torch.strided
                and gradient.stride() == slot.stride()
            ):
                plain = gradient.is_contiguous() and not gradient.requires_grad
                found[index] = gradient.view(-1) if plain else flat_memory(gradient)
        return found

    def reduce(self, direct: Mapping[int, Tensor]) -> None:
        """Collective: sum all gradients over all ranks.

        Args:
            direct: What `direct` has found; everything else is in this rank's part.
        """
        me = self._group.local_rank
        for room, runs in self._rooms:
            pieces = []
            for run in runs:
                terms = run.terms
                if run.member is not None and run.member in direct:
                    terms = [*terms[:me], direct[run.member], *terms[me + 1 :]]
                pieces.append((terms, run.total))
            self._group.reduce(room.parts, room.total, pieces=pieces)


def _cut(group: NodeGroup, room: Room) -> Iterator[_Run]:
    """Cut this rank's slice: large gradients that lie in it as a whole, and what is between."""
    own = group.own_slice(room.total.numel())
    at = own.start

    def run(start: int, stop: int, member: int | None) -> _Run:
        return _Run([part[start:stop] for part in room.parts], room.total[start:stop], member)

    placed = zip(room.bucket.members, room.bucket.offsets, room.slots, strict=True)
    for index, start, slot in sorted(placed, key=lambda one: one[1]):
        stop = start + slot.numel()
        large = slot.numel() * slot.element_size() >= _DIRECT_FROM_BYTES
        if large and own.start <= start and stop <= own.stop:
            if start > at:
                yield run(at, start, None)
            yield run(start, stop, index)
            at = stop
    if own.stop > at:
        yield run(at, own.stop, None)
