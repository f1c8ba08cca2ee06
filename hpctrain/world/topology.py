"""Where a rank stands: in the job, on its node, across nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.world.watching import DEFAULT_S, Watching

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["Communicators", "Place", "split_communicators"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The six numbers that say where a rank stands."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Communicators:
    """The communicators of a world: all ranks, this node, the same local rank on all nodes."""

    comm: Comm
    node: Comm
    cross: Comm
    watching: Watching
    """What monitors them; see `hpctrain.world.watched`."""

    def free(self) -> None:
        """Collective: give the communicators back to MPI."""
        for comm in (self.cross, self.node, self.comm):
            comm.Free()


def split_communicators(
    parent: Comm, *, timeout_s: float = DEFAULT_S
) -> tuple[Communicators, Place]:
    """Collective: find the node of every rank; `parent` is duplicated, so messages never mix.

    Nodes are numbered by their lowest rank. `cross` joins the ranks with the same local rank; where
    nodes have different numbers of ranks, it spans only the nodes that have such a rank.

    Args:
        parent: The ranks.
        timeout_s: Timeout of their collectives, once a watchdog is attached.
    """
    from mpi4py import MPI

    from hpctrain.world.watched import WatchedComm

    comm = parent.Dup()
    rank = comm.Get_rank()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
    local_rank = node.Get_rank()
    cross = comm.Split(color=local_rank, key=rank)
    # Every node has a local rank 0, so their cross communicator spans all nodes, in rank order.
    node_rank, num_nodes = node.bcast((cross.Get_rank(), cross.Get_size()), root=0)
    place = Place(
        rank=rank,
        size=comm.Get_size(),
        local_rank=local_rank,
        local_size=node.Get_size(),
        node_rank=node_rank,
        num_nodes=num_nodes,
    )
    watching = Watching(timeout_s)
    comms = Communicators(
        comm=WatchedComm(comm, watching, "comm"),
        node=WatchedComm(node, watching, "node"),
        cross=WatchedComm(cross, watching, "cross"),
        watching=watching,
    )
    return comms, place
