"""The `horovod` engine: Horovod's collectives, started from the world's MPI communicator.

Every collective has a name that is the same on all ranks and comes again in the next step, so that
Horovod's cache spares the negotiation. Sub-worlds are process sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.engines.base import Engine, Op
from hpctrain.engines.control import parts_of
from hpctrain.engines.horovod_options import HorovodOptions
from hpctrain.engines.horovod_start import Running, start
from hpctrain.engines.meeting import Finish, Watchdog
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["HorovodEngine", "create"]

_SENDS = {torch.int32, torch.int64, torch.float32, torch.float64}
_OPS = {Op.SUM: "Sum", Op.MIN: "Min", Op.MAX: "Max", Op.ADASUM: "Adasum"}
_SLOTS = 2
_NAMELESS_SLOTS = 8


def create(
    comm: Comm,
    device: torch.device,
    *,
    watch: Watchdog | None,
    options: HorovodOptions | None,
    timeout_s: float,
) -> HorovodEngine:
    """Collective: start Horovod if it does not run yet, and make an engine over all of its ranks.

    Raises:
        ConfigError: on all ranks; Horovod runs over other ranks or with other options.
    """
    running = start(comm, options or HorovodOptions(), timeout_s=timeout_s)
    return HorovodEngine(running, comm, device, range(comm.Get_size()), watch=watch)


class HorovodEngine(Engine):
    """Collectives of Horovod.

    Args:
        running: The Horovod of this process.
        comm: The ranks, in their order here; duplicated.
        device: This rank's device.
        members: The same ranks as Horovod numbers them.
        watch: Who is told when this rank waits in a collective.
    """

    name = "horovod"

    def __init__(
        self,
        running: Running,
        comm: Comm,
        device: torch.device,
        members: Sequence[int],
        *,
        watch: Watchdog | None = None,
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
                "split: Horovod makes process sets only with all of its ranks present, and this "
                "engine has some of them; split the engine of the whole world instead"
            )
        if missing and not self._running.dynamic:
            raise ConfigError(
                "split: Horovod was started elsewhere without process sets; let hpctrain start it, "
                "or set HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init()"
            )
        for ranks in missing:
            self._running.sets[ranks] = self._hvd.add_process_set(list(ranks))
