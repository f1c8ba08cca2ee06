"""Sums over the ranks of a node in the memory they share, and between nodes slice by slice.

Every rank of a node adds up its own slice of what all of them have written, always in the order of
the ranks, so equal inputs give equal bits; 16-bit values are added in float32. Between nodes, ranks
that hold the same slice give each other the parts of it, add those up in the order of the nodes,
and distribute the sums: 2(N-1)/N of the data leave each of N nodes, and all slices are sent
concurrently.

Where a node has several NUMA domains and its ranks are bound to them, one memory for all would make
every rank read most of what it adds up from another domain. Each domain is then a node of its own
here: only sums go across.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.engines import encoding
from hpctrain.engines.encoding import Op
from hpctrain.wire import Wire, add_decoded
from hpctrain.world import (
    CoreMap,
    SharedBlock,
    allocate,
    make_barrier,
    must_sleep,
    read_affinity,
    read_core_map,
)

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["NodeGroup", "combine", "divides_nodes", "domain_here", "domain_of", "slice_bounds"]

_ALIGN = 64
"""Slices begin at multiples of this many elements, so that no two ranks write to one cache line."""
_BLOCK = 1 << 16
_MOST_BYTES = 1 << 30
_COMBINE: dict[Op, Callable[..., Tensor]] = {
    Op.SUM: torch.add,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
}


def slice_bounds(num_elements: int, parts: int) -> list[tuple[int, int]]:
    """Divide elements into aligned slices, some perhaps empty. Pure."""
    lines = -(-num_elements // _ALIGN)
    ends = [min(num_elements, _ALIGN * (lines * (part + 1) // parts)) for part in range(parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def combine(parts: Sequence[Tensor], total: Tensor, op: Op = Op.SUM) -> None:
    """Combine flat tensors into `total`, which may be one of them, from the first to the last.

    Block by block, so that what is being added up stays in the cache.
    """
    call = _COMBINE[op]
    wide = torch.float32 if total.dtype in (torch.float16, torch.bfloat16) else total.dtype
    if len(parts) == 1:
        total.copy_(parts[0])
        return
    if len(parts) == 2 and wide is total.dtype:
        call(parts[0], parts[1], out=total)
        return
    step = _BLOCK * torch.get_num_threads()
    for start in range(0, total.numel(), step):
        first, *others = (part[start : start + step].to(wide) for part in parts)
        so_far = call(first, others[0])
        for piece in others[1:]:
            call(so_far, piece, out=so_far)
        total[start : start + step].copy_(so_far)


class NodeGroup:
    """The ranks of this node, and this rank's counterparts on the others.

    Where nodes are divided by their NUMA domains, each of these is a node here.

    Args:
        comm: All ranks.
        domain: The NUMA domain that this rank is bound to; None: to none alone.
        meet: Runs what waits for other ranks and registers it by name; None: not monitored.
    """

    def __init__(
        self,
        comm: Comm,
        domain: int | None = None,
        *,
        meet: Callable[[Callable[[], SharedBlock], str], SharedBlock] | None = None,
    ) -> None:
        self._meet = meet
        self.comm: Comm = comm.Dup()
        rank = self.comm.Get_rank()
        whole = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
        places = self.comm.allgather((whole.bcast(rank, root=0), domain))
        self.by_domain = divides_nodes(places)
        """Whether ranks share memory by NUMA domain, and not by node."""
        self.share_name = "NUMA domain" if self.by_domain else "node"
        """Which ranks share memory, in words."""
        color = (domain or 0) if self.by_domain else 0
        self.node: Comm = whole.Split(color, key=rank)
        whole.Free()
        self.local_rank, self.local_size = self.node.Get_rank(), self.node.Get_size()
        leads = self.comm.allgather(self.local_size if self.local_rank == 0 else 0)
        self.local_sizes = [size for size in leads if size]
        """Ranks per node, ordered by each node's lowest rank."""
        self.num_nodes = len(self.local_sizes)
        self.num_slices = min(self.local_sizes)
        self.is_even = max(self.local_sizes) == self.num_slices
        """Whether every node has equally many ranks."""
        color = self.local_rank if self.local_rank < self.num_slices else MPI.UNDEFINED
        self.across: Comm = self.comm.Split(color, key=rank)
        own = (torch.get_num_threads(), sorted(os.sched_getaffinity(0)))
        every = self.node.allgather(own)
        threads = [number for number, _ in every]
        cores = {core for _, mask in every for core in mask}
        self.barrier = make_barrier(self.comm, self.node, sleep=must_sleep(threads, len(cores)))
        everyone = self.comm.allgather(own[0])
        self.num_threads = min(everyone)
        """Threads that all ranks can use: different numbers would round differently."""
        self.threads_differ = max(everyone) != self.num_threads

    def allocate(
        self,
        num_bytes: int,
        what: str,
        slices: Sequence[tuple[int, int]] | None = None,
        *,
        private: Sequence[tuple[int, int]] = (),
    ) -> SharedBlock:
        """Collective: memory that this node's ranks share; see `hpctrain.world.shared_memory`."""

        def make() -> SharedBlock:
            return allocate(
                self.comm, self.node, num_bytes, what=what, slices=slices, private=private
            )

        return make() if self._meet is None else self._meet(make, f"allocating {what}")

    def compute_alike(self, call: Callable[[], object]) -> None:
        """Compute with as many threads as every rank has: a loop cut elsewhere rounds otherwise."""
        if not self.threads_differ:
            call()
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            call()
        finally:
            torch.set_num_threads(before)

    def own_slice(self, num_elements: int) -> slice:
        """The elements that this rank adds up."""
        return slice(*slice_bounds(num_elements, self.local_size)[self.local_rank])

    def reduce(
        self,
        parts: Sequence[Tensor],
        total: Tensor,
        op: Op = Op.SUM,
        *,
        pieces: Sequence[tuple[Sequence[Tensor], Tensor]] | None = None,
        wire: Wire | None = None,
        num_encoded: int = 0,
        key: str = "",
    ) -> None:
        """Collective: combine every rank's part into the node's `total`, over all nodes.

        Args:
            parts: The node's parts in shared memory, by local rank; each written by its rank.
            total: Node-shared as well.
            op: SUM, MIN or MAX.
            pieces: This rank's slice cut up beforehand: what is combined, by local rank, and into
                which piece of `total`; None: all of it at once, from the parts.
            wire: How sums are sent between nodes; None: as they are.
            num_encoded: This many of the first elements are encoded, the rest is sent as it is.
            key: What this is, for the wire: the same in every step.
        """
        own = self.own_slice(total.numel())
        if pieces is None:
            pieces = [([part[own] for part in parts], total[own])] if own.stop > own.start else []
        self.barrier.wait()
        for terms, piece in pieces:
            combine(terms, piece, op)
        if self.num_nodes > 1:
            if (
                not self.is_even
            ):  # the slices between nodes are not those of the ranks: wait for all
                self.barrier.wait()
            self.combine_across(total, op, wire=wire, num_encoded=num_encoded, key=key)
        self.barrier.wait()

    def combine_across(
        self,
        total: Tensor,
        op: Op = Op.SUM,
        *,
        wire: Wire | None = None,
        num_encoded: int = 0,
        key: str = "",
    ) -> None:
        """Collective over the counterparts: combine this rank's slice with the other nodes'."""
        if self.num_nodes == 1 or self.local_rank >= self.num_slices:
            return
        first, last = slice_bounds(total.numel(), self.num_slices)[self.local_rank]
        border = first if wire is None else min(max(num_encoded, first), last)
        most = _MOST_BYTES // total.element_size()
        if wire is not None:
            for start in range(first, border, most):
                self._add_encoded(total[start : min(start + most, border)], wire, f"{key}/{start}")
        for start in range(border, last, most):
            self._combine_piece(total[start : min(start + most, last)], op)

    def _add_encoded(self, piece: Tensor, wire: Wire, key: str) -> None:
        """Collective over the counterparts: add up encoded; all nodes get the same bits."""
        if wire.sums == "encoded":
            encoded = wire.encode(piece, key)
            self._combine_piece(encoded, Op.SUM)
            wire.decode(encoded, piece)
            return
        add_decoded(
            piece,
            wire,
            key,
            counts=encoding.shares(piece.numel(), self.num_nodes),
            rank=self.across.Get_rank(),
            alltoall=self._alltoall,
            allgather=self._allgather,
        )

    def _alltoall(self, sent: Tensor, to: Sequence[int], come: Sequence[int]) -> Tensor:
        arrived = sent.new_empty(sum(come))
        self.across.Alltoallv(_bytes(sent, to), _bytes(arrived, come))
        return arrived

    def _allgather(self, mine: Tensor, counts: Sequence[int]) -> Tensor:
        joined = mine.new_empty(sum(counts))
        self.across.Allgatherv(_bytes(mine), _bytes(joined, counts))
        return joined

    def _combine_piece(self, piece: Tensor, op: Op) -> None:
        counts = encoding.shares(piece.numel(), self.num_nodes)
        own = counts[self.across.Get_rank()]
        arrived = piece.new_empty((self.num_nodes, own))
        self.across.Alltoallv(
            _bytes(piece, counts), _bytes(arrived.view(-1), [own] * self.num_nodes)
        )
        sums = piece.new_empty(own)
        if own:
            combine(list(arrived.unbind()), sums, op)
        self.across.Allgatherv(_bytes(sums), _bytes(piece, counts))

    def close(self) -> None:
        """Collective: free the communicators."""
        self.barrier.close()
        if self.across != MPI.COMM_NULL:
            self.across.Free()
        self.node.Free()
        self.comm.Free()


def _bytes(tensor: Tensor, counts: Sequence[int] | None = None) -> list[object]:
    """A contiguous tensor as mpi4py takes it; data that only moves needs no dtype."""
    item = tensor.element_size()
    memory = MPI.memory.fromaddress(tensor.data_ptr(), tensor.numel() * item)
    if counts is None:
        return [memory, tensor.numel() * item, MPI.BYTE]
    sizes = np.array(counts, dtype=np.int64) * item
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    return [memory, (sizes, starts), MPI.BYTE]


def domain_of(cpus: Iterable[int], core_map: CoreMap) -> int | None:
    """The NUMA domain that has all of these CPUs; None: they are of several. Pure."""
    domains = {core_map.domain_of.get(cpu) for cpu in cpus}
    return domains.pop() if len(domains) == 1 else None


def divides_nodes(places: Sequence[tuple[int, int | None]]) -> bool:
    """Whether each NUMA domain gets memory of its own; the same on every rank. Pure.

    Only where it can pay: every rank is bound to one domain, some node has several, and no rank
    would be left without another one to share with.

    Args:
        places: Of every rank: which node it is on, by any number, and its domain.
    """
    if any(domain is None for _, domain in places):
        return False
    num_ranks = Counter(places)
    num_nodes = len({node for node, _ in places})
    return len(num_ranks) > num_nodes and min(num_ranks.values()) > 1


def domain_here() -> int | None:
    """The NUMA domain that this process is bound to; None: to none alone."""
    return domain_of(read_affinity(), read_core_map())
