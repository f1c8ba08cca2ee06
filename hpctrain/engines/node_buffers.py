"""Collectives through the memory of a node: of any tensor, and allreduce of buffers made for it.

A tensor from anywhere is copied in and out, piece by piece, so that the pieces stay in the cache. A
buffer that the engine allocated lies in shared memory already: each rank adds its slice up and
writes the sums into all buffers, while they are in its cache.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpctrain.engines import encoding
from hpctrain.engines.encoding import Op
from hpctrain.engines.node import NodeGroup, combine, slice_bounds
from hpctrain.errors import CollectiveError
from hpctrain.world import SharedBlock

__all__ = ["Buffer", "NodeBuffers", "is_large"]

PIECE_BYTES = 8 << 20
"""Chunk size for tensors that go through shared memory; see `benchmarks.collectives`."""
SMALLEST_BYTES = 4 << 20
"""Below this, a tensor outside the buffers is faster as a plain MPI message."""
_ALLGATHER, _REDUCE_SCATTER = -1, -2
_PASSED = {0: "another tensor", _ALLGATHER: "allgather", _REDUCE_SCATTER: "reduce_scatter"}
_MOST_TEXTS = 64
_HANDED_BYTES = 2 << 20
"""How much of a sum is computed before the others copy it: it is still in the cache then, and
Python overhead is small."""


def is_large(num_bytes: int) -> bool:
    """Whether shared memory is quicker than a message. Pure; the same on every rank."""
    return num_bytes >= SMALLEST_BYTES


@dataclass(frozen=True, slots=True)
class _Sum:
    """A stretch of the slice that this rank combines."""

    terms: list[Tensor]
    """Every rank's part of it, by local rank."""
    total: Tensor
    """Where it is in this rank's own buffer."""
    others: list[Tensor]
    """Where it is in the buffers of the others."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A node's buffers, cut beforehand as every allreduce needs them."""

    notes: list[int]
    """The number that all ranks have noted when all have passed this one. The first is 1; all ranks
    allocate in the same order."""
    block: SharedBlock
    own: Tensor
    sums: list[_Sum]
    texts: dict[str, str] = field(default_factory=dict)
    """Names of its collectives, by purpose."""

    def text(self, what: str) -> str:
        """A description of its allreduce that is the same on all ranks."""
        found = self.texts.get(what)
        if found is None:
            if len(self.texts) >= _MOST_TEXTS:  # the caller names every step
                self.texts.clear()
            call = "allreduce of an allocated buffer"
            found = self.texts[what] = encoding.describe(call, what, self.own)
        return found


class NodeBuffers:
    """The shared buffers of an engine. Collective to make."""

    def __init__(self, group: NodeGroup) -> None:
        self.group = group
        self._scratch: SharedBlock | None = None
        self._made: dict[int, Buffer] = {}
        self._num_made = 0
        self._notes = group.allocate(8 * group.local_size, "which buffers are combined")
        numbers = self._notes.tensor(torch.int64, num_elements=group.local_size)
        self._passed = numbers.numpy()
        """What each rank of the node has passed: the number of a buffer, 0 for any other tensor; or
        another collective."""

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks share memory. The same on every rank."""
        return self.group.num_nodes == 1

    @property
    def shares_memory(self) -> bool:
        """Whether any node has several ranks. The same on every rank."""
        return bool(max(self.group.local_sizes) > 1)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Collective: a buffer of zeros whose allreduce copies least; it lives with the engine."""
        item = torch.empty(0, dtype=dtype).element_size()
        stride = -(-max(1, num_elements) * item // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self.group.local_size
        slices = [(stride * rank, stride * (rank + 1)) for rank in range(size)]
        block = self.group.allocate(stride * size, "a buffer", slices)
        parts = [
            block.tensor(dtype, start=stride * rank, num_elements=num_elements)
            for rank in range(size)
        ]
        me = self.group.local_rank
        start, stop = slice_bounds(num_elements, size)[me]
        # Between nodes the slice is sent as a whole.
        step = _HANDED_BYTES // item if self.group.num_nodes == 1 else max(1, stop)
        self._num_made += 1
        if num_elements:
            cuts = [slice(at, min(at + step, stop)) for at in range(start, stop, step)]
            self._made[parts[me].data_ptr()] = Buffer(
                notes=[self._num_made] * size,
                block=block,
                own=parts[me],
                sums=[
                    _Sum(
                        [part[cut] for part in parts],
                        parts[me][cut],
                        [part[cut] for rank, part in enumerate(parts) if rank != me],
                    )
                    for cut in cuts
                ],
            )
        return parts[me]

    def find(self, tensor: Tensor) -> Buffer | None:
        """The buffer made here that this is as a whole, if it can be combined where it lies."""
        if tensor.layout is not torch.strided or not self.group.is_even:
            return None
        buffer = self._made.get(tensor.data_ptr())
        if buffer is None or not tensor.is_contiguous():
            return None
        same = buffer.own.numel() == tensor.numel() and buffer.own.dtype is tensor.dtype
        return buffer if same else None

    def allreduce(self, flat: Tensor, op: Op) -> None:
        """Collective: combine in place.

        Raises:
            CollectiveError: on all ranks of a node, of which some passed a buffer from `allocate`
                and others another tensor; nothing is combined then.
        """
        buffer = self.find(flat)
        if buffer is not None:
            self.combine(buffer, op)
        else:
            self._combine_copied(flat, op)

    def _meet(self, notes: list[int]) -> None:
        """Collective: wait for the node's ranks, and see that all have passed the same.

        The next call's notes are written after this call's later barriers: no rank reads them here.
        """
        self._passed[self.group.local_rank] = notes[0]
        self.group.barrier.wait()
        if self._passed.tolist() == notes:
            return
        told = [_PASSED.get(n, f"buffer {n}") for n in self._passed.tolist()]
        by_rank = ", ".join(f"{what} on local rank {rank}" for rank, what in enumerate(told))
        self.group.barrier.wait()  # all have read
        raise CollectiveError(
            f"allreduce: the ranks of this node passed different tensors: {by_rank} (buffers count "
            "in the order of engine.allocate()); pass the same allocated buffer on every rank, or "
            "none of them"
        )

    def combine(self, buffer: Buffer, op: Op) -> None:
        """Collective: combine a buffer in place; raises as `allreduce` does."""
        group = self.group
        self._meet(buffer.notes)
        for each in buffer.sums:
            combine(each.terms, each.total, op)
            if group.num_nodes > 1:
                group.combine_across(buffer.own, op)
            for other in each.others:
                other.copy_(each.total)
        group.barrier.wait()

    def _combine_copied(self, flat: Tensor, op: Op) -> None:
        group = self.group
        self._meet([0] * group.local_size)
        most = PIECE_BYTES // flat.element_size()
        parts = [
            self._pieces().tensor(flat.dtype, start=PIECE_BYTES * part, num_elements=most)
            for part in range(group.local_size + 1)
        ]
        for piece in torch.split(flat, most):
            count = piece.numel()
            parts[group.local_rank][:count].copy_(piece)
            group.reduce([part[:count] for part in parts[:-1]], parts[-1][:count], op)
            piece.copy_(parts[-1][:count])

    def _pieces(self) -> SharedBlock:
        """Collective at the first call: memory for pieces under way."""
        if self._scratch is None:
            size = PIECE_BYTES * (self.group.local_size + 1)
            self._scratch = self.group.allocate(size, "pieces under way")
        return self._scratch

    def _turns(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """Each rank's piece, twice: what is written in one turn is read while the next is written.

        So one barrier for each turn is enough: who writes to a piece again has passed the next
        turn's barrier, to which all come when they have read it.
        """
        half = PIECE_BYTES // 2
        most = half // torch.empty(0, dtype=dtype).element_size()
        return [
            [
                self._pieces().tensor(dtype, start=PIECE_BYTES * r + half * turn, num_elements=most)
                for r in range(self.group.local_size)
            ]
            for turn in (0, 1)
        ]

    def allgather(self, flat: Tensor, joined: Tensor, counts: Sequence[int]) -> None:
        """Collective on one node: every rank's values, one after the other.

        Args:
            flat: This rank's.
            joined: Where they go.
            counts: How many each rank has.
        """
        group = self.group
        me = group.local_rank
        self._meet([_ALLGATHER] * group.local_size)
        targets = torch.split(joined, list(counts))
        turns = self._turns(flat.dtype)
        is_there = targets[me].data_ptr() == flat.data_ptr()
        for number, (start, stop) in enumerate(encoding.rounds(max(counts), len(turns[0][0]))):
            pieces = turns[number % 2]
            own = flat[start:stop]
            pieces[me][: len(own)].copy_(own)
            if not is_there:
                targets[me][start:stop].copy_(own)  # from the cache, now
            group.barrier.wait()
            for step in range(1, group.local_size):  # nobody reads where everybody reads
                rank = (me + step) % group.local_size
                target = targets[rank][start:stop]
                target.copy_(pieces[rank][: len(target)])

    def reduce_scatter(self, flat: Tensor, share: Tensor, counts: Sequence[int], op: Op) -> None:
        """Collective on one node: combine values and keep this rank's share of them.

        Args:
            flat: The values of all shares, one after the other.
            share: Where this rank's go.
            counts: How many elements each rank's share has.
            op: SUM, MIN or MAX.
        """
        group = self.group
        me, size = group.local_rank, group.local_size
        self._meet([_REDUCE_SCATTER] * size)
        given = torch.split(flat, list(counts))
        turns = self._turns(flat.dtype)
        most = len(turns[0][0]) // size
        for number, (start, stop) in enumerate(encoding.rounds(max(counts), most)):
            pieces = turns[number % 2]
            for rank, part in enumerate(given):
                sent = part[start:stop]
                if rank != me:
                    pieces[me][most * rank : most * rank + len(sent)].copy_(sent)
            group.barrier.wait()
            total = share[start:stop]
            if len(total):
                place = slice(most * me, most * me + len(total))
                terms = [
                    given[me][start:stop] if r == me else pieces[r][place] for r in range(size)
                ]
                combine(terms, total, op)

    def close(self) -> None:
        """Let the files go; buffers that are still held stay readable."""
        self._notes.close()
        for buffer in self._made.values():
            buffer.block.close()
        self._made.clear()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
