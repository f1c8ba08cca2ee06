"""What an allreduce costs: latency, bandwidth and addition, in closed form. Pure.

n ranks on N nodes, S bytes. Inside a node a link is a rank's, between nodes it is the whole node's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf, log2

from hpctrain.errors import ConfigError
from hpctrain.scaling.plan.checks import count_of
from hpctrain.scaling.plan.machine import Costs

__all__ = ["Layout", "allreduce_s"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Ranks on nodes that are full but for the last."""

    num_ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        count_of(self.num_ranks, "num_ranks")
        count_of(self.ranks_per_node, "ranks_per_node")

    @property
    def num_nodes(self) -> int:
        """Nodes that have a rank."""
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def local_ranks(self) -> int:
        """Ranks on the fullest node."""
        return min(self.num_ranks, self.ranks_per_node)


def allreduce_s(num_bytes: float, layout: Layout, costs: Costs) -> float:
    """Seconds of one allreduce of so many bytes; 0 for one rank."""
    if num_bytes < 0:
        raise ConfigError(f"num_bytes={num_bytes} must not be negative")
    if layout.num_ranks == 1:
        return 0.0
    adding = costs.reduce_s_per_byte * num_bytes
    return _TOPOLOGIES[costs.topology](num_bytes, layout, costs) + adding


def _narrowest(layout: Layout, costs: Costs) -> float:
    inside = costs.intra.bytes_per_s if layout.local_ranks > 1 else inf
    between = costs.inter.bytes_per_s if layout.num_nodes > 1 else inf
    return min(inside, between)


def _ring(num_bytes: float, layout: Layout, costs: Costs) -> float:
    """One ring through all ranks: 2(n-1) hops, of which 2(N-1) leave a node."""
    hops, between = 2 * (layout.num_ranks - 1), 2 * (layout.num_nodes - 1)
    latency = (hops - between) * costs.intra.latency_s + between * costs.inter.latency_s
    share = 2 * (layout.num_ranks - 1) / layout.num_ranks
    return latency + share * num_bytes / _narrowest(layout, costs)


def _halving(num_bytes: float, layout: Layout, costs: Costs) -> float:
    """Recursive halving and doubling: as many bytes as a ring, in 2 log2(n) messages."""
    inside = ceil(log2(layout.local_ranks))
    between = ceil(log2(layout.num_nodes))
    latency = 2 * (inside * costs.intra.latency_s + between * costs.inter.latency_s)
    share = 2 * (layout.num_ranks - 1) / layout.num_ranks
    return latency + share * num_bytes / _narrowest(layout, costs)


def _tree(num_bytes: float, layout: Layout, costs: Costs) -> float:
    """Up and down two trees over the nodes, pipelined; a chain inside each node."""
    chain, depth = layout.local_ranks - 1, ceil(log2(layout.num_nodes))
    latency = 2 * (chain * costs.intra.latency_s + depth * costs.inter.latency_s)
    return latency + 2 * num_bytes / _narrowest(layout, costs)


def _hierarchical(num_bytes: float, layout: Layout, costs: Costs) -> float:
    """Add up inside each node, exchange slices between nodes, and look at the sum.

    Inside, two barriers and one pass at what the node's ranks together do a second; between nodes
    every slice goes to its owner and back, 2(N-1)/N of the data out of each node.
    """
    inside = 0.0
    if layout.local_ranks > 1:
        inside = 2 * costs.intra.latency_s + num_bytes / costs.intra.bytes_per_s
    others, nodes = layout.num_nodes - 1, layout.num_nodes
    between = 2 * others * costs.inter.latency_s
    return inside + between + 2 * others / nodes * num_bytes / costs.inter.bytes_per_s


_TOPOLOGIES: dict[str, Callable[[float, Layout, Costs], float]] = {
    "ring": _ring,
    "halving": _halving,
    "tree": _tree,
    "hierarchical": _hierarchical,
}
