"""Where torch's process groups meet: a store on rank 0, whose address and port travel by MPI."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed
from mpi4py import MPI

from hpctrain.world import agree, current_launch

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["MeetingPoint", "open_store"]

_dist: Any = torch.distributed  # its names come from C++, and its stubs miss some
_LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # nothing is sent: connecting a datagram socket only asks the routing table


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
            store = _dist.TCPStore(
                address, 0, None, is_master=True, timeout=limit, wait_for_workers=False
            )
        except RuntimeError as error:
            trouble = f"no port can be opened on {address}: {error}"
    agree(comm, trouble, timeout_s=timeout_s)
    there = comm.bcast((address, store.port) if store is not None else None, root=0)
    if store is None:
        try:
            store = _dist.TCPStore(
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
    # Rank 0's node asks for its way to another node, all others for their way to rank 0.
    here = lowest[comm.Get_rank()]
    there = 0 if here != lowest[0] else next(rank for rank in lowest if rank != here)
    try:
        return _address_towards(hosts[there]), None
    except OSError as error:
        return "", (
            f"host {hosts[there]} of rank {there} is not known on {socket.gethostname()} "
            f"({error}); the torch engine needs host names that resolve on all nodes"
        )


def _address_towards(host: str) -> str:
    """The address of the network interface that leads to a host."""
    family, kind, _, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(target)
        return str(asking.getsockname()[0])
