"""What every engine offers: a few collectives on torch tensors, the same on all of them.

The base class does what can be decided without communicating, so that all engines behave alike:
it refuses what cannot be sent before any rank has communicated, makes tensors contiguous, flat and
of a dtype that the engine can send, and cuts what is too large for one message. An engine is left
with primitives on flat, contiguous tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from hpctrain.engines import rows, wire
from hpctrain.engines.meeting import Finish, Meeting, Pending, Watch, Work
from hpctrain.engines.op import Op, as_op
from hpctrain.errors import ConfigError

__all__ = ["Engine", "Op", "Watch", "Work"]


class Engine(Meeting, ABC):
    """Collectives over the ranks of a world. All ranks call the same methods in the same order.

    Args:
        comm: The ranks; duplicated here. None for a rank alone.
        device: Where this rank's tensors are, besides the CPU.
        watch: Who is told when this rank waits in a collective.
    """

    chunk: ClassVar[int] = 2**30
    """The most elements in one message: counts in Horovod, in MPI 3 and in NCCL have 32 bits."""

    @property
    def ops(self) -> frozenset[Op]:
        """What allreduce can do on this engine, here."""
        return frozenset({Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX})

    def allocate(self, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Collective: a flat buffer of zeros that this engine combines with the fewest copies."""
        wire.check_buffer(num_elements, dtype)
        return torch.zeros(num_elements, dtype=dtype, device=self.device)

    def allreduce_(self, tensor: Tensor, op: Op = Op.SUM, *, what: str = "") -> Tensor:
        """Collective: combine `tensor` over all ranks in place; shape, dtype and op must match.

        Args:
            tensor: Any shape and layout; CPU or the engine's device.
            op: How to combine. AVERAGE needs a floating or complex dtype.
            what: What this is, for messages about ranks that stay out: a bucket, a parameter.
        """
        op = as_op(op)
        parcel, on_wire = self._pack(tensor, op)
        if parcel is None:
            return tensor

        def exchange() -> None:
            for piece in wire.pieces(parcel, self.chunk):
                self._allreduce(piece, on_wire, what)

        self.meet(exchange, "allreduce", what, tensor)
        wire.store(wire.decode(parcel, tensor.dtype, op, self.size), tensor)
        return tensor

    def allreduce_async_(self, tensor: Tensor, op: Op = Op.SUM, *, what: str = "") -> Work:
        """Collective: start what `allreduce_` does; leave the tensor alone until `wait()`."""
        op = as_op(op)
        parcel, on_wire = self._pack(tensor, op)
        if parcel is None:
            return Pending(None)
        pieces = torch.split(parcel, self.chunk)
        ends = self._run(
            lambda: [self._start_allreduce(piece, on_wire, what) for piece in pieces], "allreduce"
        )
        if self.on_post is not None:
            self.on_post(wire.describe("allreduce", what, tensor))

        def finish() -> None:
            self.meet(lambda: _end_all(ends), "allreduce", what, tensor)
            wire.store(wire.decode(parcel, tensor.dtype, op, self.size), tensor)

        return Pending(finish)

    def reduce_scatter(self, tensor: Tensor, op: Op = Op.SUM, *, what: str = "") -> Tensor:
        """Collective: combine and keep this rank's part of dimension 0, as `torch.tensor_split`."""
        op = as_op(op)
        self._check("reduce_scatter", tensor, op, self.ops - {Op.ADASUM})
        if tensor.dim() == 0:
            raise ConfigError(
                "reduce_scatter: the tensor has no dimension to divide; use allreduce_"
            )
        share = wire.shares(tensor.shape[0], self.size)[self.rank]
        shape = (share, *tensor.shape[1:])
        if tensor.numel() == 0:
            return tensor.new_empty(shape)
        sends = partial(self._sends, device=tensor.device)
        parcel, on_wire = wire.encode(wire.flatten(tensor), op, sends, self.size, owned=False)
        lines = parcel.view(tensor.shape[0], -1)
        fits = parcel.numel() <= self.chunk
        exchange = self._reduce_scatter if fits else self._reduce_and_cut
        part = self.meet(lambda: exchange(lines, on_wire, what), "reduce_scatter", what, tensor)
        return wire.decode(part.reshape(-1), tensor.dtype, op, self.size).view(shape)

    def broadcast_(self, tensor: Tensor, root: int = 0, *, what: str = "") -> Tensor:
        """Collective: overwrite `tensor` with the root's; shape, dtype and root must match."""
        self._check("broadcast", tensor)
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast: root={root} is no rank; choose 0 <= root < {self.size}")
        if tensor.numel() == 0:
            return tensor
        flat = wire.flatten(tensor)

        def exchange() -> None:
            for piece in torch.split(wire.to_bytes(flat), self.chunk):
                self._broadcast(piece, root, what)

        self.meet(exchange, "broadcast", what, tensor)
        wire.store(flat, tensor)
        return tensor

    def allgather(self, tensor: Tensor, *, what: str = "") -> Tensor:
        """Collective: join all ranks' tensors along dimension 0, whose sizes may differ.

        A 0-d tensor counts as one row.
        """
        return self.allgather_rows(tensor, what=what)[0]

    def allgather_rows(self, tensor: Tensor, *, what: str = "") -> tuple[Tensor, list[int]]:
        """Collective: what `allgather` gives, and how many rows came from each rank."""
        self._check("allgather", tensor, written=False)
        lines = tensor.reshape(1) if tensor.dim() == 0 else tensor

        def exchange() -> tuple[Tensor, list[int]]:
            return rows.allgather(self._control, lines, self.chunk, partial(self._allgather, what))

        return self.meet(exchange, "allgather", what, lines, rows_vary=True)

    def alltoall(
        self, tensor: Tensor, splits: Sequence[int] | None = None, *, what: str = ""
    ) -> tuple[Tensor, list[int]]:
        """Collective: send `splits[r]` rows to rank r; returns what came and rows from each rank.

        Args:
            tensor: Rows in the order of the ranks they go to.
            splits: How many rows go to each rank; None sends equally many. A mistake in them on one
                rank is refused by all.
            what: What this is, for messages.
        """
        self._check("alltoall", tensor, written=False)
        if tensor.dim() == 0:
            raise ConfigError("alltoall: the tensor has no dimension to divide; use allgather")

        def exchange() -> tuple[Tensor, list[int]]:
            send = partial(self._alltoall, what)
            return rows.alltoall(self._control, tensor, splits, self.chunk, send)

        return self.meet(exchange, "alltoall", what, tensor, rows_vary=True)

    def barrier(self) -> None:
        """Collective: wait for all ranks."""
        self.check_open("barrier")
        self.meet(self._control.barrier, "barrier", "", None)

    def split(self, color: int | None, key: int = 0) -> Engine | None:
        """Collective: an engine over the ranks of the same color, ordered by key; None: in none."""
        self.check_open("split")
        return self.meet(lambda: self._divide(color, key), "split", "", None)

    def close(self, *, cure: str = "make another one") -> None:
        """Collective: give back what the engine holds; a second call does nothing.

        Args:
            cure: What those are told who use it afterwards.
        """
        self._cure = cure
        if not self._closed:
            self._closed = True
            self.meet(self._give_back, "close", "", None)

    # What an engine adds: primitives on flat, contiguous tensors.

    @abstractmethod
    def _sends(self, dtype: torch.dtype, op: Op, device: torch.device) -> bool:
        """Whether the engine combines this dtype itself; float32, float64, int32... always."""

    @abstractmethod
    def _start_allreduce(self, flat: Tensor, op: Op, what: str) -> Finish:
        """Collective: start combining in place; the returned call waits for the result."""

    @abstractmethod
    def _broadcast(self, flat: Tensor, root: int, what: str) -> None:
        """Collective: overwrite the bytes with the root's."""

    @abstractmethod
    def _allgather(self, what: str, flat: Tensor, counts: list[int]) -> Tensor:
        """Collective: join all ranks' bytes; rank r gives `counts[r]`, perhaps none."""

    @abstractmethod
    def _alltoall(self, what: str, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Collective: give `sent[r]` bytes to rank r and take `received[r]` from it."""

    @abstractmethod
    def _split(self, table: list[tuple[int | None, int]]) -> Engine | None:
        """Collective: this rank's part; `table` has every rank's color and key."""

    def _close(self) -> None:
        """Collective: give back what the engine holds besides its communicator."""

    def _allreduce(self, flat: Tensor, op: Op, what: str) -> None:
        self._start_allreduce(flat, op, what)()

    def _reduce_scatter(self, lines: Tensor, op: Op, what: str) -> Tensor:
        """Collective: combine rows and return this rank's share of them, in memory of its own."""
        return self._reduce_and_cut(lines, op, what)

    # What the base class does with them.

    def _reduce_and_cut(self, lines: Tensor, op: Op, what: str) -> Tensor:
        whole = lines.clone()
        for piece in torch.split(whole.view(-1), self.chunk):
            self._allreduce(piece, op, what)
        return whole.tensor_split(self.size)[self.rank].clone()

    def _divide(self, color: int | None, key: int) -> Engine | None:
        table = self._control.gather_objects((color, key))
        wrong = [rank for rank, (given, _) in enumerate(table) if given is not None and given < 0]
        if wrong:
            raise ConfigError(
                f"split: rank {wrong[0]} gave color={table[wrong[0]][0]}; colors are 0 or more, or "
                "None to be in no part"
            )
        part = self._split(table)
        if part is not None:
            own = table[self.rank][0]
            ordered = sorted((k, rank) for rank, (c, k) in enumerate(table) if c == own)
            part.watch_among(self._watchdog, [self.members[rank] for _, rank in ordered])
        return part

    def _give_back(self) -> None:
        self._close()
        self._control.free()

    def _pack(self, tensor: Tensor, op: Op) -> tuple[Tensor | None, Op]:
        """Check a tensor for allreduce and make it flat; None when there is nothing to send."""
        self._check("allreduce", tensor, op, self.ops)
        if tensor.numel() == 0:
            return None, op
        if op is Op.ADASUM and tensor.numel() > self.chunk:
            raise ConfigError(
                f"allreduce: adasum of {tensor.numel()} elements; it is not the adasum of its "
                f"parts, so give it at most {self.chunk}"
            )
        sends = partial(self._sends, device=tensor.device)
        return wire.encode(wire.flatten(tensor), op, sends, self.size, owned=True)


def _end_all(ends: list[Finish]) -> None:
    for end in ends:
        end()
