"""Gathers and reductions of shards in memory that the ranks of a node share.

FSDP2 copies its shards into a buffer, gathers that, and copies whole parameters out of it;
gradients it copies into a buffer before they are reduced. Where these buffers lie in shared memory,
nothing is left to send: the ranks wait for each other once, and read what others have copied in.

There are two buffers of each kind, used in turn. Who writes to one again has passed the other one's
meeting, to which all ranks come when they have read. Where they have not (several gathers under
way, by explicit prefetching), they say so there, and the next gather goes by message.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from hpctrain import log
from hpctrain.errors import CollectiveError
from hpctrain.torch_backend.comparing import digest, in_words
from hpctrain.torch_backend.process_group import MpiProcessGroup
from hpctrain.torch_backend.reducing import as_reduction

if TYPE_CHECKING:
    from hpctrain.world import SharedBlock

__all__ = ["NodeStaging", "add_up"]

_c10d: Any = distributed_c10d
_MOST_BYTES = 1 << 29
"""Larger units go by message, piece by piece: their buffers would take too much of the memory."""
_BLOCK = 1 << 16
_CLEAR, _HERE = 2, 1
_DIGESTS = 1 << 56


class NodeStaging:
    """Buffers of one sharded model; made, where all ranks share memory, by the first gather.

    Args:
        group: Over which ranks the model is sharded.
        gathered: Bytes of each unit's parameters, whole.
        reduced: Bytes of each unit's gradients, whole.
        is_clear: Whether all that was gathered on this rank has been copied out.
    """

    def __init__(
        self,
        group: MpiProcessGroup,
        *,
        gathered: Sequence[int],
        reduced: Sequence[int],
        is_clear: Callable[[], bool],
    ) -> None:
        self.group = group
        self.all_gather = NodeGather(self)
        """What torch's `set_custom_all_gather` takes."""
        self.reduce_scatter = NodeReduction(self)
        """What torch's `set_custom_reduce_scatter` takes."""
        self.why_not: str | None = None
        """Why messages are sent instead, in words; None: they are not, or nobody knows yet."""
        self._num_gathered = _room_for(gathered)
        self._num_reduced = _room_for(reduced)
        self._is_clear = is_clear
        self._opened = False
        self._num_meetings = 0
        self._blocks: list[SharedBlock] = []

    def turn_off(self, why: str) -> None:
        """Send messages instead; all ranks alike, before the first gather."""
        self._opened = True
        self.why_not = why

    def open(self) -> bool:
        """Collective at the first call: make the buffers; returns whether there are some."""
        if not self._opened:
            self._opened = True
            self._open()
        return self.why_not is None

    def _open(self) -> None:
        nodes = self.group.engine.node_group()
        if nodes.num_nodes > 1:
            self.why_not = f"the ranks are on several {nodes.share_name}s"
            return
        size = nodes.local_size
        own = 2 * self._num_reduced
        slices = [(own * rank, own * (rank + 1)) for rank in range(size)]
        try:
            self._blocks = [
                nodes.allocate(16 * size, "what ranks gather and reduce"),
                nodes.allocate(2 * self._num_gathered, "gathered shards"),
                nodes.allocate(own * size, "gradients to be reduced", slices),
            ]
        except CollectiveError as error:  # raised on all ranks
            self.why_not = str(error)
            if self.group.rank() == 0:
                log.warn(f"shards are gathered by messages, which is slower: {error}")
            return
        for block in self._blocks:
            weakref.finalize(self, block.close)
        notes = self._blocks[0].tensor(torch.int64, num_elements=2 * size)
        self._notes = notes.numpy().reshape(2, size)

    def meet(self, text: str, *, is_here: bool) -> tuple[bool, bool]:
        """Collective: wait for all ranks, and see that they do the same.

        Args:
            text: The call; the same on all ranks.
            is_here: Whether this rank has copied its data into the buffer.

        Returns:
            Whether all ranks have, and whether all have read what was gathered before.

        Raises:
            CollectiveError: calls differ.
        """
        group, row = self.group, self._notes[self._num_meetings % 2]
        self._num_meetings += 1
        # With its number: a rank that is elsewhere has left an old note here, which must not do.
        number = (digest(text) + self._num_meetings) % _DIGESTS
        row[group.rank()] = 4 * number + _CLEAR * self._is_clear() + _HERE * is_here
        barrier = group.engine.node_group().barrier

        def exchange() -> list[int]:
            barrier.wait()
            told: list[int] = row.tolist()
            if any(one >> 2 != told[0] >> 2 for one in told):
                group.refuse(text)
            return told

        told = group.engine.meet(exchange, f"{text} in the {group.where}", "", None)
        return all(one & _HERE for one in told), all(one & _CLEAR for one in told)

    def gather_buffer(self, turn: int, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """The buffer of a turn, from its begin; None: it is too small."""
        if num_elements * dtype.itemsize > self._num_gathered:
            return None
        start = turn * self._num_gathered
        return self._blocks[1].tensor(dtype, start=start, num_elements=num_elements)

    def reduction_buffer(
        self, rank: int, turn: int, num_elements: int, dtype: torch.dtype
    ) -> Tensor | None:
        """A rank's buffer of a turn, from its begin; None: it is too small."""
        if num_elements * dtype.itemsize > self._num_reduced:
            return None
        start = (2 * rank + turn) * self._num_reduced
        return self._blocks[2].tensor(dtype, start=start, num_elements=num_elements)


class NodeGather:
    """What torch calls to allocate and to gather; as its `AllGather`."""

    def __init__(self, staging: NodeStaging) -> None:
        self._staging = staging
        self._turn = 0
        self._may_write = True
        self._handed = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Collective at the first call: where this rank's shards go, and the others' come from."""
        place = None
        if device.type == "cpu" and self._staging.open() and self._may_write:
            place = self._staging.gather_buffer(self._turn, math.prod(size), dtype)
        self._handed = 0 if place is None else place.data_ptr()
        return torch.empty(*size, dtype=dtype, device=device) if place is None else place

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Collective: return when every rank has copied its shards in."""
        staging = self._staging
        if output_tensor.device.type == "cpu" and group is staging.group and staging.open():
            is_here = bool(self._handed) and output_tensor.data_ptr() == self._handed
            text = f"all_gather_single {in_words(input_tensor)}"
            all_here, self._may_write = staging.meet(text, is_here=is_here)
            self._turn = 1 - self._turn
            if all_here:
                return
        group.all_gather_single(output_tensor, input_tensor)


class NodeReduction:
    """What torch calls to allocate and to reduce; as its `ReduceScatter`."""

    def __init__(self, staging: NodeStaging) -> None:
        self._staging = staging
        self._turn = 0
        self._handed = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where gradients go before they are reduced; torch then asks for the result's place."""
        place = None
        if device.type == "cpu" and not self._handed and self._staging.open():
            rank = self._staging.group.rank()
            count = math.prod(size)
            place = self._staging.reduction_buffer(rank, self._turn, count, dtype)
        if place is None:
            return torch.empty(*size, dtype=dtype, device=device)
        self._handed = place.data_ptr()
        return place

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Collective: add up this rank's part of what all ranks have copied in."""
        staging, handed = self._staging, self._handed
        self._handed = 0
        how = as_reduction(op, "reduce_scatter_single")
        is_simple = how.name in ("SUM", "AVG") and group is staging.group
        if input_tensor.device.type == "cpu" and is_simple and staging.open():
            is_here = bool(handed) and input_tensor.data_ptr() == handed
            text = f"reduce_scatter_single {how.name} {in_words(input_tensor)}"
            all_here, _ = staging.meet(text, is_here=is_here)
            turn = self._turn
            self._turn = 1 - turn
            if all_here:
                self._add_up(output_tensor, input_tensor, turn, average=how.name == "AVG")
                return
        options = _c10d.ReduceScatterOptions()
        options.reduceOp = op
        group.reduce_scatter_single(output_tensor, input_tensor, options)

    def _add_up(self, output: Tensor, given: Tensor, turn: int, *, average: bool) -> None:
        staging = self._staging
        rank, size = staging.group.rank(), staging.group.size()
        mine = slice(rank * output.numel(), (rank + 1) * output.numel())
        buffers = (
            staging.reduction_buffer(r, turn, given.numel(), given.dtype) for r in range(size)
        )
        terms = [buffer[mine] for buffer in buffers if buffer is not None]
        add_up(terms, output, size if average else 1)


def add_up(terms: Sequence[Tensor], total: Tensor, divisor: int) -> None:
    """Add flat tensors in their order and divide, block by block, so that blocks stay in the cache.

    16-bit values are added in float32, and rounded once.
    """
    wide = torch.float32 if total.dtype in (torch.float16, torch.bfloat16) else total.dtype
    for start in range(0, total.numel(), _BLOCK):
        first, *others = (term[start : start + _BLOCK] for term in terms)
        place = total[start : start + _BLOCK]
        if wide is total.dtype and others:
            so_far = torch.add(first, others[0], out=place)
            others = others[1:]
        else:
            so_far = first.to(wide, copy=True)
        for other in others:
            so_far.add_(other)
        if divisor != 1:
            so_far.div_(divisor)
        if so_far is not place:
            place.copy_(so_far)


def _room_for(sizes: Sequence[int]) -> int:
    """Bytes of the largest unit that is staged, in whole pages. Pure."""
    largest = max((size for size in sizes if size <= _MOST_BYTES), default=0)
    return -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE
