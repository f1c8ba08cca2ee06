"""Where gradients lie on a node, and what the ranks do there: add up, measure, scale and clip.

    [ rank 0's part | rank 1's part | ... | the sum ]     for each dtype

Every part has the layout of `hpctrain.fusion.layout`: gradients, flags, control words. All ranks
read the sum through private (copy-on-write) views: what one rank writes to a gradient after
the exchange (clipping) is seen by that rank alone. A rank that never writes copies nothing back.

Each rank sums one slice. No other rank reads this rank's part of its own slice: a gradient that
lies in it as a whole is added from where torch has put it, and never written to shared memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.fusion import CONTROL_WORDS, Bucket, cut_into_runs, is_dense, like_parameter
from hpctrain.precision import multiply, sum_of_squares
from hpctrain.update import flat_memory
from hpctrain.wire import ENCODABLE
from hpctrain.world import PrivateView, SharedBlock

if TYPE_CHECKING:
    from hpctrain.engines import Engine, NodeGroup
    from hpctrain.wire import Wire

__all__ = ["GradientBuffer", "NodeMemory", "NodeNorms", "NodeSums"]

_CPU = torch.device("cpu")
_DIRECT_FROM_BYTES = 32 << 10
"""A smaller gradient is copied with all others: one more sum would cost more than it saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientBuffer:
    """The memory of one dtype."""

    bucket: Bucket
    parts: list[Tensor]
    """Every rank's gradients, by local rank."""
    total: Tensor
    """Their sum."""
    own: PrivateView
    seen: Tensor
    """The summed gradients as this rank sees them, end to end."""
    slots: list[Tensor]
    """This rank's gradients, one view per member."""
    views: list[Tensor]
    """The summed gradients, one view per member."""

    @property
    def num_bytes(self) -> int:
        """Of one rank's part, and of the sum."""
        return self.total.numel() * self.total.element_size()

    def flags(self) -> Tensor:
        """How many ranks have used each member."""
        start = self.bucket.flags
        return self.total[start : start + len(self.bucket.members)].clone()

    def control(self) -> Tensor | None:
        """The summed control words, in the one bucket that has them."""
        start = self.bucket.control
        return None if start is None else self.total[start : start + CONTROL_WORDS].clone()


class NodeMemory:
    """All buffers of a model's gradients. Collective to make.

    Args:
        group: The ranks of the node.
        buckets: One per dtype.
        parameters: As the buckets' members count them.
    """

    def __init__(
        self, group: NodeGroup, buckets: Sequence[Bucket], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        self._parameters = parameters
        plans = [(bucket, _pages(bucket), getattr(torch, bucket.dtype)) for bucket in buckets]
        num_parts = group.local_size + 1
        total = sum(pages * num_parts for _, pages, _ in plans)
        sums, at = [], 0
        for _, pages, _ in plans:
            sums.append((at + pages * group.local_size, pages))
            at += pages * num_parts
        placed = _placed(plans, group.local_size)
        self.block = group.allocate(total, "gradients", placed, private=sums)
        self.buffers: list[GradientBuffer] = []
        at = 0
        for (bucket, pages, dtype), own in zip(plans, self.block.views, strict=True):
            parts = [
                self.block.tensor(dtype, start=at + pages * part, num_elements=bucket.stop)
                for part in range(num_parts)
            ]
            part = at + pages * group.local_rank
            self.buffers.append(
                GradientBuffer(
                    bucket=bucket,
                    parts=parts[:-1],
                    total=parts[-1],
                    own=own,
                    seen=own.tensor(dtype, num_elements=bucket.flags),
                    slots=self._cut(bucket, dtype, self.block, part),
                    views=self._cut(bucket, dtype, own, 0),
                )
            )
            at += pages * num_parts

    def _cut(
        self, bucket: Bucket, dtype: torch.dtype, memory: SharedBlock | PrivateView, start: int
    ) -> list[Tensor]:
        """A tensor per member, each with storage of its own: saving one saves no others."""
        views = []
        for index, offset in zip(bucket.members, bucket.offsets, strict=True):
            parameter = self._parameters[index]
            at = start + offset * dtype.itemsize
            piece = memory.tensor(dtype, start=at, num_elements=parameter.numel())
            dense = is_dense(parameter)
            views.append(like_parameter(piece, parameter) if dense else piece.view(parameter.shape))
        return views

    def close(self) -> None:
        """Release the file; gradients that are still referenced stay."""
        self.block.close()


def _pages(bucket: Bucket) -> int:
    """The bytes of a part, in whole pages."""
    dtype: torch.dtype = getattr(torch, bucket.dtype)
    return -(-bucket.stop * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


def _placed(
    plans: Sequence[tuple[Bucket, int, torch.dtype]], num_ranks: int
) -> list[tuple[int, int]] | None:
    """Which bytes each rank touches first: its own part; the sum is not divided."""
    if len(plans) != 1:
        return None  # several dtypes lie one after the other: an even division does
    pages = plans[0][1]
    return [(pages * rank, pages * (rank + 1)) for rank in range(num_ranks)]


@dataclass(frozen=True, slots=True)
class _Run:
    """A stretch of this rank's slice."""

    terms: list[Tensor]
    """Every rank's part of it, by local rank."""
    total: Tensor
    member: int | None
    """The parameter whose whole gradient it is, if it can be summed from torch's own memory."""


class NodeSums:
    """Adds up what the ranks of a node have written.

    Args:
        group: The ranks.
        buffers: Where gradients meet, one for each dtype.
        wire: How sums are sent between nodes; None: as they are.
    """

    def __init__(
        self, group: NodeGroup, buffers: Sequence[GradientBuffer], wire: Wire | None = None
    ) -> None:
        self._group = group
        self._wire = wire
        self._buffers = [(buffer, list(_cut_slice(group, buffer))) for buffer in buffers]
        self._slots = {
            run.member: buffer.slots[buffer.bucket.members.index(run.member)]
            for buffer, runs in self._buffers
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
        for buffer, runs in self._buffers:
            pieces = []
            for run in runs:
                terms = run.terms
                if run.member is not None and run.member in direct:
                    terms = [*terms[:me], direct[run.member], *terms[me + 1 :]]
                pieces.append((terms, run.total))
            wire = self._wire if buffer.total.dtype in ENCODABLE else None
            self._group.reduce(
                buffer.parts,
                buffer.total,
                pieces=pieces,
                wire=wire,
                num_encoded=buffer.bucket.flags,
                key=buffer.bucket.dtype,
            )


def _cut_slice(group: NodeGroup, buffer: GradientBuffer) -> Iterator[_Run]:
    """Cut this rank's slice: large gradients that lie in it as a whole, and what is between."""
    own = group.own_slice(buffer.total.numel())
    at = own.start

    def run(start: int, stop: int, member: int | None) -> _Run:
        return _Run([part[start:stop] for part in buffer.parts], buffer.total[start:stop], member)

    placed = zip(buffer.bucket.members, buffer.bucket.offsets, buffer.slots, strict=True)
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


class NodeNorms:
    """What scaling and clipping do to the sums of a node.

    A rank reads and writes its own slice alone, so no rank has to wait between the two; partial
    sums of squares meet in shared memory.
    """

    def __init__(self, engine: Engine, group: NodeGroup, buffers: Sequence[GradientBuffer]) -> None:
        self._engine = engine
        self._group = group
        self._buffers = buffers
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
        # In float64, whatever this rank's slice holds: all ranks must continue with the same bits.
        kept, left = total.unbind()
        return kept, left

    def scale(self, factor: Tensor, excluded: frozenset[int], excluded_factor: Tensor) -> None:
        """Collective: multiply, the excluded parameters by a separate factor."""
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
        for buffer in self._buffers:
            own = self._group.own_slice(buffer.bucket.flags)
            for start, stop, is_apart in cut_into_runs(buffer.bucket, excluded):
                start, stop = max(start, own.start), min(stop, own.stop)
                if start < stop:
                    yield buffer.total[start:stop], is_apart
