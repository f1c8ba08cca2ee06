"""The `horovod` engine: Horovod's collectives, started from the world's MPI communicator.

Every collective has a name that is the same on all ranks and comes again in the next step, so that
Horovod's cache spares the negotiation. Sub-worlds are process sets.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.engines.base import Engine, EngineWatchdog, Finish, Op
from hpctrain.engines.horovod_options import HorovodOptions, to_environment
from hpctrain.engines.registry import BUILT_IN
from hpctrain.engines.rows import parts_of
from hpctrain.errors import ConfigError
from hpctrain.world import agree

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from hpctrain.world import World

__all__ = ["HorovodEngine", "Running", "start"]

_SENDS = {torch.int32, torch.int64, torch.float32, torch.float64}
_OPS = {Op.SUM: "Sum", Op.MIN: "Min", Op.MAX: "Max", Op.ADASUM: "Adasum"}
_SLOTS = 2
_NAMELESS_SLOTS = 8


@dataclass
class Running:
    """The Horovod of this process."""

    hvd: Any
    """The module `horovod.torch`."""
    comm: Comm
    options: HorovodOptions
    dynamic: bool
    """Whether process sets can be added: not if the script started Horovod without them."""
    sets: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """Process sets by their ranks; Horovod refuses a second one over the same ranks."""
    num_engines: int = 0


_running: Running | None = None


def start(comm: Comm, options: HorovodOptions, *, timeout_s: float) -> Running:
    """Collective: start Horovod over these ranks, or take the one that runs if it fits.

    Raises:
        ConfigError: on all ranks; it runs over other ranks, or with other options.
    """
    global _running  # a process has one Horovod, so this is where the process keeps it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own imports warn of what setuptools will drop
        import horovod.torch as hvd
    agree(comm, _why_not(hvd, comm, options), error=ConfigError, timeout_s=timeout_s)
    if _running is None:
        dynamic = not hvd.is_initialized()
        kept = comm.Dup()  # Horovod keeps the object, so it must not be freed
        if dynamic:
            variables = {**to_environment(options), "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
            with _environment(variables):
                hvd.init(comm=kept)
        _running = Running(hvd=hvd, comm=kept, options=options, dynamic=dynamic)
        everyone = tuple(range(comm.Get_size()))
        _running.sets[everyone] = hvd.global_process_set
    return _running


def _why_not(hvd: Any, comm: Comm, options: HorovodOptions) -> str | None:
    """Why the Horovod of this process cannot serve these ranks and options, or None."""
    if _running is not None:
        if MPI.Comm.Compare(_running.comm, comm) not in (MPI.IDENT, MPI.CONGRUENT):
            return (
                f"Horovod already runs over {_running.comm.Get_size()} ranks in this process and "
                f"cannot start again over {comm.Get_size()} others; make the engine over the whole "
                "world and use split(), or take the mpi or torch engine for the second world"
            )
        if options not in (_running.options, HorovodOptions()):
            return (
                f"Horovod already runs with {_changed(_running.options)} and cannot change to "
                f"{_changed(options)}; give the options to the first engine of the process"
            )
        return None
    if not hvd.is_initialized():
        return None
    if (hvd.rank(), hvd.size()) != (comm.Get_rank(), comm.Get_size()):
        return (
            f"Horovod was started elsewhere as rank {hvd.rank()} of {hvd.size()}, but here this is "
            f"rank {comm.Get_rank()} of {comm.Get_size()}; do not call hvd.init() yourself"
        )
    if options != HorovodOptions():
        return "Horovod was started elsewhere, so options come too late; do not call hvd.init()"
    return None


def _changed(options: HorovodOptions) -> str:
    return str(to_environment(options)) if options != HorovodOptions() else "default options"


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for as long as Horovod reads them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class HorovodEngine(Engine):
    """Collectives of Horovod.

    Args:
        running: The Horovod of this process.
        comm: The ranks, in their order here; duplicated.
        device: This rank's device.
        members: The same ranks as Horovod numbers them.
        watch: Monitors this rank's collectives.
    """

    name = "horovod"
    capabilities = BUILT_IN["horovod"].capabilities

    def __init__(
        self,
        running: Running,
        comm: Comm,
        device: torch.device,
        members: Sequence[int],
        *,
        watch: EngineWatchdog | None = None,
    ) -> None:
        super().__init__(comm, device, watch=watch)
        self._comm: Comm = comm.Dup()
        self._running = running
        self._hvd = running.hvd
        self._members = list(members)
        in_set = sorted(members)
        self._set = running.sets[tuple(in_set)]
        # Horovod orders a set by its own ranks: where in the set each of our ranks is, and back.
        self._place_of = [in_set.index(member) for member in members]
        self._rank_at = [self._members.index(member) for member in in_set]
        self._ordered = self._members == in_set
        number = comm.bcast(running.num_engines, root=0)
        running.num_engines = max(running.num_engines, number) + 1
        self._prefix = f"hpctrain.{self._set.process_set_id}.{number}"
        self._turns: dict[str, int] = {}
        self._in_flight: dict[str, int] = {}
        self._nccl = device.type == "cuda" and bool(self._hvd.nccl_built())

    @classmethod
    def make(
        cls,
        world: World,
        *,
        watch: EngineWatchdog | None,
        options: HorovodOptions | None,
        timeout_s: float,
    ) -> Self:
        """Collective: start Horovod if it does not run yet, and make an engine over all its ranks.

        Raises:
            ConfigError: on all ranks; Horovod runs over other ranks or with other options.
        """
        running = start(world.comm, options or HorovodOptions(), timeout_s=timeout_s)
        return cls(running, world.comm, world.device, range(world.size), watch=watch)

    @property
    def process_set(self) -> Any:
        """Horovod's own process set, for what drives Horovod directly."""
        return self._set

    @cached_property
    def ops(self) -> frozenset[Op]:
        """What allreduce can do: Adasum only over all ranks, and only for powers of two."""
        return super().ops | ({Op.ADASUM} if self._has_adasum() else set())

    def _has_adasum(self) -> bool:
        nodes = self._hvd.size() // self._hvd.local_size() if self._nccl else self.size
        even = not self._nccl or self._hvd.mpi_ops.is_homogeneous()
        return self._set.process_set_id == 0 and even and nodes & (nodes - 1) == 0

    def _sends(self, dtype: torch.dtype, op: Op, device: torch.device) -> bool:
        by_nccl = self._nccl and device.type == "cuda"
        return dtype in _SENDS or (dtype is torch.float16 and by_nccl and op is Op.SUM)

    def _start_allreduce(self, flat: Tensor, op: Op, what: str) -> Finish:
        hvd = self._hvd
        name = self._next_name(f"allreduce.{op}.{what}.{flat.dtype}.{flat.numel()}", what)
        chosen = getattr(hvd, _OPS[op])
        handle = hvd.allreduce_async_(flat, name=name, op=chosen, process_set=self._set)
        self._in_flight[name] = handle

        def finish() -> None:
            hvd.synchronize(handle)
            if self._in_flight.get(name) == handle:
                del self._in_flight[name]

        return finish

    def _reduce_scatter(self, lines: Tensor, op: Op, what: str) -> Tensor:
        if op is not Op.SUM or not self._ordered or lines.shape[0] < self.size:
            return self._reduce_and_cut(lines, op, what)
        name = f"{self._prefix}.reduce_scatter.{what}.{lines.dtype}.{tuple(lines.shape)}"
        handle = self._hvd.reducescatter_async(
            lines, name=name, op=self._hvd.Sum, process_set=self._set
        )
        part: Tensor = self._hvd.synchronize(handle)
        return part

    def _broadcast(self, flat: Tensor, root: int, what: str) -> None:
        name = f"{self._prefix}.broadcast.{what}.{flat.numel()}"
        self._hvd.broadcast_(flat, self._members[root], name=name, process_set=self._set)

    def _allgather(self, what: str, flat: Tensor, counts: list[int]) -> Tensor:
        name = f"{self._prefix}.allgather.{what}"
        handle = self._hvd.allgather_async(flat, name=name, process_set=self._set)
        joined: Tensor = self._hvd.synchronize(handle)
        return self._to_ours(joined, counts)

    def _alltoall(self, what: str, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        name = f"{self._prefix}.alltoall.{what}"
        splits = [sent[rank] for rank in self._rank_at]
        if not self._ordered:
            parts = torch.split(flat, sent)
            flat = torch.cat([parts[rank] for rank in self._rank_at])
        handle = self._hvd.alltoall_async(
            flat, splits=torch.tensor(splits, dtype=torch.int32), name=name, process_set=self._set
        )
        came: Tensor = self._hvd.synchronize(handle)[0]
        return self._to_ours(came, received)

    def _to_ours(self, joined: Tensor, counts: list[int]) -> Tensor:
        """Parts in the order of our ranks, from parts in the order of Horovod's."""
        if self._ordered:
            return joined
        parts = torch.split(joined, [counts[rank] for rank in self._rank_at])
        return torch.cat([parts[place] for place in self._place_of])

    def _next_name(self, base: str, what: str) -> str:
        """A name that no collective in flight has; few of them, so that Horovod remembers all."""
        turn = self._turns.get(base, 0)
        self._turns[base] = (turn + 1) % (_SLOTS if what else _NAMELESS_SLOTS)
        name = f"{self._prefix}.{base}.{turn}"
        if name in self._in_flight:  # every rank has started it, so this ends
            self._hvd.synchronize(self._in_flight.pop(name))
        return name

    def _split(self, table: list[tuple[int | None, int]]) -> Engine | None:
        parts = parts_of(table)
        self._add_sets(parts)
        color, key = table[self.rank]
        part = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        if color is None:
            return None
        members = [self._members[rank] for rank in parts[color]]
        try:
            return HorovodEngine(self._running, part, self.device, members, watch=None)
        finally:
            part.Free()

    def _close(self) -> None:
        for handle in self._in_flight.values():
            self._hvd.synchronize(handle)
        self._comm.Free()

    def _add_sets(self, parts: dict[int, list[int]]) -> None:
        """Collective over all of Horovod's ranks: make the process sets that are still missing."""
        sets = [tuple(sorted(self._members[rank] for rank in ranks)) for ranks in parts.values()]
        missing = [ranks for ranks in sets if ranks not in self._running.sets]
        if missing and self._set.process_set_id != 0:
            raise ConfigError(
                "split: Horovod creates process sets only over all of its ranks, and this engine "
                "has some of them; split the engine of the whole world instead"
            )
        if missing and not self._running.dynamic:
            raise ConfigError(
                "split: Horovod was started elsewhere without process sets; let hpctrain start it, "
                "or set HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init()"
            )
        for ranks in missing:
            self._running.sets[ranks] = self._hvd.add_process_set(list(ranks))
