"""What every engine offers: a few collectives on torch tensors, the same on all of them.

The base class does what can be decided without communicating, so that all engines behave the same:
it refuses what cannot be sent before any rank has communicated, makes tensors contiguous, flat and
of a dtype that the engine can send, and cuts what is too large for one message. An engine is left
with primitives on flat, contiguous tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from hpctrain.engines import encoding, rows
from hpctrain.engines.encoding import Op, as_op
from hpctrain.engines.registry import Capabilities
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.wire import ENCODABLE, Wire, add_decoded

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from hpctrain.engines.horovod_options import HorovodOptions
    from hpctrain.engines.node import NodeGroup
    from hpctrain.world import World

__all__ = ["Engine", "EngineWatch", "EngineWatchdog", "Finish", "Op", "Pending"]

T = TypeVar("T")
Finish = Callable[[], None]


class EngineWatch(Protocol):
    """Monitors every collective, so that a missing rank can be named."""

    def enter(self, call: str) -> None:
        """A collective begins; `call` names it and is the same on all ranks."""

    def leave(self) -> None:
        """The collective has ended."""


class EngineWatchdog(EngineWatch, Protocol):
    """A watch over all ranks, which can give each part of them a watch of its own."""

    def among(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> EngineWatch:
        """A watch for the collectives of some ranks only."""

    @property
    def all_waited_s(self) -> float:
        """Seconds that this thread has spent in collectives, in all."""


class Meeting:
    """What engines share besides the collectives: ranks, device, checks, watch.

    Args:
        comm: The ranks; duplicated here. None for a rank alone.
        device: Where this rank's tensors are, besides the CPU.
        watch: Monitors this rank's collectives.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    """Optional capabilities of this engine."""
    reason: str = "asked for"
    """Why this engine was chosen."""

    def __init__(
        self, comm: Comm | None, device: torch.device, *, watch: EngineWatchdog | None
    ) -> None:
        self._control = rows.Control(comm)
        self._watchdog = watch
        self._watch: EngineWatch | None = watch
        self._closed = False
        self._cure = ""
        self.rank = self._control.rank
        self.size = self._control.size
        self.device = device
        self.members: tuple[int, ...] = tuple(range(self.size))
        """The world ranks of this engine, in its own order."""
        self.on_post: Callable[[str], None] | None = None
        """Observers of collectives that are started now and waited for later."""

    @property
    def watchdog(self) -> EngineWatchdog | None:
        """What monitors its collectives, for other code that makes its own calls."""
        return self._watchdog

    def watch_among(self, watchdog: EngineWatchdog | None, members: Sequence[int]) -> None:
        """Collective over a subset of ranks: count its calls separately."""
        self.members = tuple(members)
        self._watchdog = watchdog
        self._watch = None if watchdog is None else watchdog.among(members)

    def _check(
        self,
        call: str,
        tensor: Tensor,
        op: Op | None = None,
        ops: frozenset[Op] = frozenset(),
        *,
        written: bool = True,
    ) -> None:
        self.check_open(call)
        written = written and call != "reduce_scatter"
        encoding.check_tensor(tensor, call=call, device=self.device, written=written)
        if op is not None:
            encoding.check_op(tensor, op, call=call, ops=ops, engine=self.name)

    def check_open(self, call: str) -> None:
        """Refuse a call of an engine that was closed.

        Raises:
            ConfigError: with what to do.
        """
        if self._closed:
            raise ConfigError(f"{call}: this {self.name} engine is closed; {self._cure}")

    def meet(
        self,
        exchange: Callable[[], T],
        call: str,
        what: str,
        tensor: Tensor | None,
        *,
        rows_vary: bool = False,
    ) -> T:
        """Run what waits for other ranks, and let the watch know."""
        if self._watch is None:
            return self._run(exchange, call)
        if tensor is None:
            self._watch.enter(call)
        else:
            self._watch.enter(encoding.describe(call, what, tensor, rows_vary=rows_vary))
        try:
            return self._run(exchange, call)
        finally:
            self._watch.leave()

    def _run(self, exchange: Callable[[], T], call: str) -> T:
        try:
            return exchange()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # MPI's, Horovod's and torch.distributed's errors all are
            raise CollectiveError(f"{call} failed in the {self.name} engine: {error}") from error


class Pending:
    """A collective under way, which `wait` finishes once."""

    def __init__(self, finish: Finish | None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Block until the tensor holds the result."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Engine(Meeting, ABC):
    """Collectives over the ranks of a world. All ranks call the same methods in the same order.

    Args:
        comm: The ranks; duplicated here. None for a rank alone.
        device: Where this rank's tensors are, besides the CPU.
        watch: Monitors this rank's collectives.
    """

    chunk: ClassVar[int] = 2**30
    """The most elements in one message: counts in Horovod, in MPI 3 and in NCCL have 32 bits."""

    @classmethod
    def make(
        cls,
        world: World,
        *,
        watch: EngineWatchdog | None,
        options: HorovodOptions | None,
        timeout_s: float,
    ) -> Self:
        """Collective: an engine over all ranks of a world.

        Args:
            world: The ranks.
            watch: Monitors every collective.
            options: Of the `horovod` engine; None for every other.
            timeout_s: How long to wait for missing ranks.
        """
        return cls(world.comm, world.device, watch=watch)

    def node_group(self) -> NodeGroup:
        """Collective at the first call: this node's ranks and their counterparts elsewhere.

        Raises:
            ConfigError: this engine is without `capabilities.shares_memory`.
        """
        raise ConfigError(f"the {self.name} engine shares no memory; use engine='mpi'")

    @property
    def ops(self) -> frozenset[Op]:
        """What allreduce can do on this engine, here."""
        return frozenset({Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX})

    def allocate(self, num_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Collective: a flat buffer of zeros that this engine combines with the fewest copies."""
        encoding.check_buffer(num_elements, dtype)
        return torch.zeros(num_elements, dtype=dtype, device=self.device)

    def allreduce_(self, tensor: Tensor, op: Op = Op.SUM, *, what: str = "") -> Tensor:
        """Collective: combine `tensor` over all ranks in place; shape, dtype and op must match.

        Args:
            tensor: Any shape and layout; CPU or the engine's device.
            op: How to combine. AVERAGE needs a floating or complex dtype.
            what: What this is, for messages about missing ranks: a bucket, a parameter.
        """
        op = as_op(op)
        packed, on_wire = self._pack(tensor, op)
        if packed is None:
            return tensor

        def exchange() -> None:
            for piece in encoding.pieces(packed, self.chunk):
                self._allreduce(piece, on_wire, what)

        self.meet(exchange, "allreduce", what, tensor)
        encoding.store(encoding.decode(packed, tensor.dtype, op, self.size), tensor)
        return tensor

    def allreduce_async_(self, tensor: Tensor, op: Op = Op.SUM, *, what: str = "") -> Pending:
        """Collective: start what `allreduce_` does; leave the tensor alone until `wait()`."""
        op = as_op(op)
        packed, on_wire = self._pack(tensor, op)
        if packed is None:
            return Pending(None)
        pieces = torch.split(packed, self.chunk)
        ends = self._run(
            lambda: [self._start_allreduce(piece, on_wire, what) for piece in pieces], "allreduce"
        )
        if self.on_post is not None:
            self.on_post(encoding.describe("allreduce", what, tensor))

        def finish() -> None:
            self.meet(lambda: _end_all(ends), "allreduce", what, tensor)
            encoding.store(encoding.decode(packed, tensor.dtype, op, self.size), tensor)

        return Pending(finish)

    def allreduce_encoded_(self, flat: Tensor, wire: Wire, *, what: str = "") -> Tensor:
        """Collective: add up a flat tensor over all ranks in place, encoded on the way.

        All ranks get the same bits: what a rank has added up itself is encoded for it as well.

        Args:
            flat: One-dimensional and contiguous, float32 or float64; as many elements everywhere.
            wire: The same kind on all ranks.
            what: What this is, for messages and for the wire: the same in every step.
        """
        self._check("allreduce", flat, Op.SUM, self.ops)
        if flat.dim() != 1 or not flat.is_contiguous() or flat.dtype not in ENCODABLE:
            raise ConfigError(
                f"allreduce_encoded_: {flat.dtype} of shape {tuple(flat.shape)}; give a contiguous "
                "one-dimensional float32 or float64 tensor"
            )
        if flat.numel() == 0 or self.size == 1:
            return flat
        if wire.sums == "encoded":
            encoded = wire.encode(flat, what)
            self.allreduce_(encoded, Op.SUM, what=what)
            wire.decode(encoded, flat)
            return flat

        def exchange() -> None:
            for number, piece in enumerate(torch.split(flat, self.chunk)):
                add_decoded(
                    piece,
                    wire,
                    f"{what}/{number}",
                    counts=encoding.shares(piece.numel(), self.size),
                    rank=self.rank,
                    alltoall=partial(self._alltoall, what),
                    allgather=partial(self._allgather, what),
                )

        self.meet(exchange, "allreduce", what, flat)
        return flat

    def reduce_scatter(self, tensor: Tensor, op: Op = Op.SUM, *, what: str = "") -> Tensor:
        """Collective: combine and keep this rank's part of dimension 0, as `torch.tensor_split`."""
        op = as_op(op)
        self._check("reduce_scatter", tensor, op, self.ops - {Op.ADASUM})
        if tensor.dim() == 0:
            raise ConfigError(
                "reduce_scatter: the tensor has no dimension to divide; use allreduce_"
            )
        share = encoding.shares(tensor.shape[0], self.size)[self.rank]
        shape = (share, *tensor.shape[1:])
        if tensor.numel() == 0:
            return tensor.new_empty(shape)
        sends = partial(self._sends, device=tensor.device)
        packed, on_wire = encoding.encode(
            encoding.flatten(tensor), op, sends, self.size, owned=False
        )
        lines = packed.view(tensor.shape[0], -1)
        fits = packed.numel() <= self.chunk
        exchange = self._reduce_scatter if fits else self._reduce_and_cut
        part = self.meet(lambda: exchange(lines, on_wire, what), "reduce_scatter", what, tensor)
        return encoding.decode(part.reshape(-1), tensor.dtype, op, self.size).view(shape)

    def broadcast_(self, tensor: Tensor, root: int = 0, *, what: str = "") -> Tensor:
        """Collective: overwrite `tensor` with the root's; shape, dtype and root must match."""
        self._check("broadcast", tensor)
        if not 0 <= root < self.size:
            raise ConfigError(
                f"broadcast: root={root} is not a rank; choose 0 <= root < {self.size}"
            )
        if tensor.numel() == 0:
            return tensor
        flat = encoding.flatten(tensor)

        def exchange() -> None:
            for piece in torch.split(encoding.to_bytes(flat), self.chunk):
                self._broadcast(piece, root, what)

        self.meet(exchange, "broadcast", what, tensor)
        encoding.store(flat, tensor)
        return tensor

    def allgather(self, tensor: Tensor, *, what: str = "") -> Tensor:
        """Collective: join all ranks' tensors along dimension 0, whose sizes may differ.

        A 0-d tensor counts as one row.
        """
        return self.allgather_rows(tensor, what=what)[0]

    def allgather_into(self, output: Tensor, tensor: Tensor, *, what: str = "") -> None:
        """Collective: join equal tensors of all ranks in memory that is there.

        Args:
            output: As many elements as all ranks' tensors together, of the same dtype.
            tensor: Shape and dtype must match on all ranks. It may be this rank's part of the
                output.
            what: What this is, for messages.

        Raises:
            ConfigError: the output does not fit.
        """
        self._check_into(output, tensor)
        encoding.store(self.allgather(tensor.reshape(-1), what=what), output)

    def _check_into(self, output: Tensor, tensor: Tensor) -> None:
        self._check("allgather", tensor, written=False)
        self._check("allgather", output)
        if output.numel() != tensor.numel() * self.size or output.dtype != tensor.dtype:
            raise ConfigError(
                f"allgather: the output is {output.dtype} {tuple(output.shape)}, the tensor of "
                f"each of {self.size} ranks {tensor.dtype} {tuple(tensor.shape)}; the output must "
                f"have {self.size} times as many elements of the same dtype"
            )

    def allgather_rows(self, tensor: Tensor, *, what: str = "") -> tuple[Tensor, list[int]]:
        """Collective: the result of `allgather`, and how many rows came from each rank."""
        self._check("allgather", tensor, written=False)
        lines = tensor.reshape(1) if tensor.dim() == 0 else tensor

        def exchange() -> tuple[Tensor, list[int]]:
            return rows.allgather(self._control, lines, self.chunk, partial(self._allgather, what))

        return self.meet(exchange, "allgather", what, lines, rows_vary=True)

    def gather_parts(self, flat: Tensor, counts: Sequence[int], *, what: str = "") -> Tensor:
        """Collective: join flat tensors whose lengths all ranks know.

        Args:
            flat: This rank's, `counts[rank]` elements; the dtype must match.
            counts: Every rank's number of elements.
            what: What this is, for messages.
        """
        self._check("allgather", flat, written=False)
        sizes = [count * flat.element_size() for count in counts]

        def exchange() -> Tensor:
            return self._allgather(what, encoding.to_bytes(flat), sizes)

        return self.meet(exchange, "allgather", what, flat, rows_vary=True).view(flat.dtype)

    def alltoall(
        self, tensor: Tensor, splits: Sequence[int] | None = None, *, what: str = ""
    ) -> tuple[Tensor, list[int]]:
        """Collective: send `splits[r]` rows to rank r; returns the received rows and their counts.

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
        """Collective: free the engine's resources; a second call does nothing.

        Args:
            cure: Advice in the error for later calls.
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
        """Collective: free the engine's resources besides its communicator."""

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
                f"allreduce: adasum of {tensor.numel()} elements; adasum cannot be computed in "
                f"parts, so pass at most {self.chunk}"
            )
        sends = partial(self._sends, device=tensor.device)
        return encoding.encode(encoding.flatten(tensor), op, sends, self.size, owned=True)


def _end_all(ends: list[Finish]) -> None:
    for end in ends:
        end()
