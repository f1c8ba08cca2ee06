"""The `torch` engine: process groups of torch.distributed, bootstrapped from MPI.

Groups are made directly from a store whose address and free port are sent by MPI: no environment
variable is read, torch's global default group is left to the user, and several engines can exist.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed
from mpi4py import MPI
from torch import Tensor
from torch.distributed import distributed_c10d

from hpctrain.engines import encoding
from hpctrain.engines.base import Engine, EngineWatchdog, Finish, Op
from hpctrain.engines.registry import BUILT_IN
from hpctrain.errors import ConfigError
from hpctrain.world import agree, current_launch

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from hpctrain.engines.horovod_options import HorovodOptions
    from hpctrain.world import World

__all__ = ["BACKENDS", "MeetingPoint", "TorchEngine", "open_store"]

dist: Any = distributed_c10d  # its names come from C++, and its stubs miss some
torch_distributed: Any = torch.distributed

BACKENDS = {"cpu": "Gloo", "cuda": "NCCL", "xpu": "XCCL"}
"""The backend for each kind of device. `cuda` is also ROCm, by RCCL: not tested, nor is XCCL."""

_SENDS = {
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
}
_SENDS_ON_DEVICE = {torch.float16, torch.bfloat16}
_OPS = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
}
_FOLDS: dict[Op, Callable[[Tensor], Tensor]] = {
    Op.SUM: lambda parts: parts.sum(0, dtype=parts.dtype),
    Op.MIN: lambda parts: parts.amin(0),
    Op.MAX: lambda parts: parts.amax(0),
}

_LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent: connecting a datagram socket only queries the routing table


class TorchEngine(Engine):
    """Collectives of torch.distributed: NCCL on GPUs, Gloo on CPUs.

    On a GPU a collective has ended when the current stream has passed it, as everything in torch:
    the host continues. A missing rank is then detected after `timeout_s`.

    Args:
        comm: The ranks; duplicated here.
        device: This rank's device.
        watch: Monitors this rank's collectives.
        timeout_s: The most that the start and every collective may take.

    Raises:
        ConfigError: on all ranks; two ranks share a GPU, or torch was built without the backend.
        CollectiveError: on all ranks; some rank could not be reached.
    """

    name = "torch"
    capabilities = BUILT_IN["torch"].capabilities

    def __init__(
        self,
        comm: Comm,
        device: torch.device,
        *,
        watch: EngineWatchdog | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(comm, device, watch=watch)
        self._limit = timedelta(seconds=timeout_s)
        self._comm: Comm = comm.Dup()
        agree(self._comm, _why_not(device), error=ConfigError, timeout_s=timeout_s)
        self._refuse_shared_gpus()
        self._point = open_store(self._comm, timeout_s=timeout_s)
        self._groups: dict[str, Any] = {}
        self._group(device)
        self._comm.Barrier()  # no rank is still connecting when the first collective begins

    @classmethod
    def make(
        cls,
        world: World,
        *,
        watch: EngineWatchdog | None,
        options: HorovodOptions | None,
        timeout_s: float,
    ) -> Self:
        """Collective: over all ranks, with a time limit of its own."""
        return cls(world.comm, world.device, watch=watch, timeout_s=timeout_s)

    def _sends(self, dtype: torch.dtype, op: Op, device: torch.device) -> bool:
        return dtype in _SENDS or (device.type != "cpu" and dtype in _SENDS_ON_DEVICE)

    def _start_allreduce(self, flat: Tensor, op: Op, what: str) -> Finish:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        options.timeout = self._limit
        work = self._group(flat.device).allreduce([flat], options)
        return lambda: _end(work)

    def _reduce_scatter(self, lines: Tensor, op: Op, what: str) -> Tensor:
        if lines.device.type == "cpu":
            return self._exchange_and_fold(lines, op, what)
        share = encoding.shares(lines.shape[0], self.size)
        if share[0] != share[-1]:  # equal shares only: fill the short ones up
            filled = lines.new_zeros(self.size, share[0], lines.shape[1])
            for target, part in zip(filled, lines.tensor_split(self.size), strict=True):
                target[: len(part)] = part
            lines = filled.view(-1, lines.shape[1])
        part = lines.new_empty(share[0], lines.shape[1])
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        options.timeout = self._limit
        _end(self._group(lines.device)._reduce_scatter_base(part, lines, options))
        return part[: share[self.rank]]

    def _exchange_and_fold(self, lines: Tensor, op: Op, what: str) -> Tensor:
        """Gloo scatters equal parts only: exchange the parts, then combine them in rank order."""
        num_rows, width = lines.shape
        share = encoding.shares(num_rows, self.size)
        line_bytes = width * lines.element_size()
        mine = share[self.rank]
        sent = [count * line_bytes for count in share]
        received = [mine * line_bytes] * self.size
        came = self._alltoall(what, encoding.to_bytes(lines.view(-1)), sent, received)
        return _FOLDS[op](came.view(lines.dtype).view(self.size, mine, width))

    def _broadcast(self, flat: Tensor, root: int, what: str) -> None:
        _end(self._start_broadcast(flat, root))

    def _start_broadcast(self, flat: Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = self._limit
        return self._group(flat.device).broadcast([flat], options)

    def _allgather(self, what: str, flat: Tensor, counts: list[int]) -> Tensor:
        joined = flat.new_empty(sum(counts))
        if len(set(counts)) == 1:
            options = dist.AllgatherOptions()
            options.timeout = self._limit
            _end(self._group(flat.device)._allgather_base(joined, flat, options))
            return joined
        # Backends gather equal sizes only: broadcast each part into its place, all at once.
        parts = torch.split(joined, counts)
        parts[self.rank].copy_(flat)
        works = [self._start_broadcast(part, r) for r, part in enumerate(parts) if len(part)]
        for work in works:
            _end(work)
        return joined

    def _alltoall(self, what: str, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        came = flat.new_empty(sum(received))
        options = dist.AllToAllOptions()
        options.timeout = self._limit
        _end(self._group(flat.device).alltoall_base(came, flat, received, sent, options))
        return came

    def _split(self, table: list[tuple[int | None, int]]) -> Engine | None:
        color, key = table[self.rank]
        part = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        limit_s = self._limit.total_seconds()
        try:
            return TorchEngine(part, self.device, watch=None, timeout_s=limit_s)
        finally:
            part.Free()

    def _close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._comm.Barrier()  # no rank is left inside a collective of a group that goes away
        for kind, group in self._groups.items():
            if kind != "cpu":
                group.shutdown()
        self._groups.clear()
        self._comm.Barrier()  # rank 0 has the store, so it leaves last
        del self._point
        self._comm.Free()

    def _group(self, device: torch.device) -> Any:
        """Collective at the first use of a kind of device: the process group that carries it."""
        group = self._groups.get(device.type)
        if group is None:
            store = dist.PrefixStore(device.type, self._point.store)
            group = self._groups[device.type] = self._make_group(device.type, store)
        return group

    def _make_group(self, kind: str, store: Any) -> Any:
        backend: Any = getattr(dist, f"ProcessGroup{BACKENDS[kind]}")
        options = backend._Options() if kind == "cpu" else backend.Options()
        options._timeout = self._limit
        if kind == "cpu":
            options._devices = [backend.create_device(hostname=self._point.address)]
        return backend(store, self.rank, self.size, options)

    def _refuse_shared_gpus(self) -> None:
        """Collective: NCCL hangs or fails when two ranks share a GPU, so say it first."""
        if self.device.type != "cuda":
            return
        uuid = str(getattr(torch.cuda.get_device_properties(self.device), "uuid", ""))
        users = self._comm.allgather(uuid)
        for first, name in enumerate(users):
            if name and name in users[first + 1 :]:
                second = users.index(name, first + 1)
                raise ConfigError(
                    f"ranks {first} and {second} share one GPU ({name}), which NCCL refuses; give "
                    "each rank its own, or use the mpi engine"
                )


def _end(work: Any) -> None:
    if work is not None:
        work.wait()


def _why_not(device: torch.device) -> str | None:
    """Why this torch cannot serve the device, or None."""
    if device.type not in BACKENDS:
        kinds = ", ".join(BACKENDS)
        return f"the torch engine has no backend for {device.type}, only for {kinds}"
    name = f"ProcessGroup{BACKENDS[device.type]}"
    if not hasattr(dist, name):
        return (
            f"this torch ({torch.__version__}) is built without {BACKENDS[device.type]}; use the "
            "mpi engine, or a torch that has it"
        )
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingPoint:
    """The store, and the address under which other ranks reach this one."""

    store: Any
    address: str


def open_store(comm: Comm, *, timeout_s: float) -> MeetingPoint:
    """Collective: open a store on rank 0, on a port that is free there, and connect all ranks.

    Raises:
        CollectiveError: on all ranks, when one of them cannot open it or reach it.
    """
    limit = timedelta(seconds=timeout_s)
    address, trouble = _own_address(comm)
    agree(comm, trouble, timeout_s=timeout_s)
    store: Any = None
    if comm.Get_rank() == 0:
        try:
            store = torch_distributed.TCPStore(
                address, 0, None, is_master=True, timeout=limit, wait_for_workers=False
            )
        except RuntimeError as error:
            trouble = f"no port can be opened on {address}: {error}"
    agree(comm, trouble, timeout_s=timeout_s)
    there = comm.bcast((address, store.port) if store is not None else None, root=0)
    if store is None:
        try:
            store = torch_distributed.TCPStore(
                *there, None, is_master=False, timeout=limit, wait_for_workers=False
            )
        except RuntimeError as error:
            trouble = f"{there[0]} port {there[1]} of rank 0 cannot be reached: {error}"
    agree(comm, trouble, timeout_s=timeout_s)
    return MeetingPoint(store=store, address=address)


def _own_address(comm: Comm) -> tuple[str, str | None]:
    """Collective: the address of this rank that ranks on other nodes reach, and what went wrong."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    one_node = comm.allreduce(node.Get_size() == comm.Get_size(), op=MPI.LAND)
    lowest = comm.allgather(node.bcast(comm.Get_rank(), root=0))
    node.Free()
    hosts = comm.allgather(current_launch().network_name(socket.gethostname()))
    if one_node:
        return _LOOPBACK, None
    # Rank 0's node looks up its route to another node, all others their route to rank 0.
    here = lowest[comm.Get_rank()]
    there = 0 if here != lowest[0] else next(rank for rank in lowest if rank != here)
    try:
        return _address_towards(hosts[there]), None
    except OSError as error:
        return "", (
            f"host {hosts[there]} of rank {there} does not resolve on {socket.gethostname()} "
            f"({error}); the torch engine needs host names that resolve on all nodes"
        )


def _address_towards(host: str) -> str:
    """The address of the network interface that leads to a host."""
    family, kind, _, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(target)
        return str(asking.getsockname()[0])
