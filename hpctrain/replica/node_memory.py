"""Where gradients lie on a node: a part for each rank, and one place for their sum.

    [ rank 0's part | rank 1's part | ... | the sum ]     for each dtype

Every part has the layout of `hpctrain.fusion.layout`: gradients, flags, control words. All ranks
read the sum through views that are theirs to scribble on: what one rank writes to a gradient after
the exchange (clipping) is seen by that rank alone. A rank that never writes copies nothing back.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.fusion import CONTROL_WORDS, Bucket, is_dense, like_parameter
from hpctrain.world import PrivateView, SharedBlock

if TYPE_CHECKING:
    from hpctrain.engines import NodeGroup

__all__ = ["NodeMemory", "Room"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
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
    """Where this rank's gradients go, one view per member."""
    views: list[Tensor]
    """The summed gradients, one view per member."""

    @property
    def tail(self) -> slice:
        """The flags, and the control words where this bucket has them."""
        return slice(self.bucket.flags, self.bucket.stop)

    def flags(self) -> Tensor:
        """How many ranks have used each member."""
        start = self.bucket.flags
        return self.total[start : start + len(self.bucket.members)].clone()

    def control(self) -> Tensor | None:
        """The summed control words, in the one bucket that has them."""
        start = self.bucket.control
        return None if start is None else self.total[start : start + CONTROL_WORDS].clone()


class NodeMemory:
    """All rooms of a model's gradients. Collective to make.

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
        self.rooms: list[Room] = []
        at = 0
        for (bucket, pages, dtype), own in zip(plans, self.block.views, strict=True):
            parts = [
                self.block.tensor(dtype, start=at + pages * part, num_elements=bucket.stop)
                for part in range(num_parts)
            ]
            part = at + pages * group.local_rank
            self.rooms.append(
                Room(
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
        """Let the file go; gradients that are still looked at stay."""
        self.block.close()


def _pages(bucket: Bucket) -> int:
    """The bytes of a part, in whole pages."""
    dtype: torch.dtype = getattr(torch, bucket.dtype)
    return -(-bucket.stop * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


def _placed(
    plans: Sequence[tuple[Bucket, int, torch.dtype]], num_ranks: int
) -> list[tuple[int, int]] | None:
    """Which bytes each rank touches first: its own part; the sum is divided by nobody's."""
    if len(plans) != 1:
        return None  # several dtypes lie one after the other: an even division does
    pages = plans[0][1]
    return [(pages * rank, pages * (rank + 1)) for rank in range(num_ranks)]
