"""What an allreduce costs in closed form, and what the slowest of n ranks costs. Pure.

n ranks on N nodes, S bytes. Inside a node a link is a rank's, between nodes it is the whole node's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, erf, log2, sqrt

import numpy as np

from hpctrain.errors import ConfigError
from hpctrain.predict.machine import Costs
from hpctrain.tables import count_of, number_of

__all__ = [
    "LinkShares",
    "RankLayout",
    "allreduce_s",
    "doublings",
    "encoded_allreduce_s",
    "expected_maximum",
    "shares_of",
    "slowest_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkShares:
    """What of an allreduce goes over which link: messages after each other, and parts of S."""

    intra_hops: int
    intra_bytes: float
    inter_hops: int
    inter_bytes: float


def allreduce_s(num_bytes: float, layout: RankLayout, costs: Costs) -> float:
    """Seconds of one allreduce of this many bytes; 0 for one rank."""
    if num_bytes < 0:
        raise ConfigError(f"num_bytes={num_bytes} must not be negative")
    if layout.num_ranks == 1:
        return 0.0
    shares = shares_of(costs.topology, layout)
    latency = shares.intra_hops * costs.intra.latency_s + shares.inter_hops * costs.inter.latency_s
    inside = shares.intra_bytes * num_bytes / costs.intra.bytes_per_s
    between = shares.inter_bytes * num_bytes / costs.inter.bytes_per_s
    if costs.topology == "hierarchical":
        moving = inside * (1 + costs.crowding * doublings(layout)) + between
    else:  # both links at the same time: a pipeline is as fast as its narrowest place
        narrow = shares.inter_bytes * num_bytes / costs.intra.bytes_per_s
        moving = max(inside, between, narrow if layout.local_ranks > 1 else 0.0)
    return latency + moving + costs.reduce_s_per_byte * num_bytes


def encoded_allreduce_s(
    num_bytes: float, layout: RankLayout, costs: Costs, *, ratio: float
) -> float:
    """Seconds of an allreduce with a wire: as it is inside each node, encoded between them.

    Args:
        num_bytes: Of the gradients.
        layout: Several nodes.
        costs: Of the links. What encoding costs is not in them.
        ratio: Bytes between nodes for a byte of gradients.
    """
    node = RankLayout(num_ranks=layout.local_ranks, ranks_per_node=layout.local_ranks)
    shares = _hierarchical(layout)
    between = shares.inter_bytes * num_bytes * ratio / costs.inter.bytes_per_s
    latency = shares.inter_hops * costs.inter.latency_s
    inside = allreduce_s(num_bytes, node, costs)
    return (inside or costs.reduce_s_per_byte * num_bytes) + latency + between


def doublings(layout: RankLayout) -> float:
    """How often the ranks of the fullest node have doubled since there were two."""
    return max(0.0, log2(layout.local_ranks / 2))


def shares_of(topology: str, layout: RankLayout) -> LinkShares:
    """What of an allreduce goes over which link.

    Raises:
        ConfigError: the topology is unknown.
    """
    if topology not in _SHARES:
        raise ConfigError(f"topology={topology!r}; choose one of {', '.join(_SHARES)}")
    return _SHARES[topology](layout)


def _pipelined(layout: RankLayout, *, intra_hops: int, inter_hops: int, part: float) -> LinkShares:
    """All of it over the network where there are several nodes, which is taken to be narrower."""
    several = layout.num_nodes > 1
    return LinkShares(
        intra_hops=intra_hops,
        intra_bytes=0.0 if several else part,
        inter_hops=inter_hops,
        inter_bytes=part if several else 0.0,
    )


def _ring(layout: RankLayout) -> LinkShares:
    """One ring through all ranks: 2(n-1) hops, of which 2(N-1) leave a node."""
    hops, between = 2 * (layout.num_ranks - 1), 2 * (layout.num_nodes - 1)
    part = 2 * (layout.num_ranks - 1) / layout.num_ranks
    return _pipelined(layout, intra_hops=hops - between, inter_hops=between, part=part)


def _halving(layout: RankLayout) -> LinkShares:
    """Recursive halving and doubling: as many bytes as a ring, in 2 log2(n) messages."""
    inside, between = ceil(log2(layout.local_ranks)), ceil(log2(layout.num_nodes))
    part = 2 * (layout.num_ranks - 1) / layout.num_ranks
    return _pipelined(layout, intra_hops=2 * inside, inter_hops=2 * between, part=part)


def _tree(layout: RankLayout) -> LinkShares:
    """Up and down two trees over the nodes, pipelined; a chain inside each node."""
    chain, depth = layout.local_ranks - 1, ceil(log2(layout.num_nodes))
    part = 2.0 if layout.num_ranks > 1 else 0.0
    return _pipelined(layout, intra_hops=2 * chain, inter_hops=2 * depth, part=part)


def _hierarchical(layout: RankLayout) -> LinkShares:
    """Sum inside each node, exchange slices between nodes, and read the sum.

    Inside, two barriers of log2(n) rounds and one pass, which the ranks that share the memory make
    at the same time and slow down for each other; between nodes every slice goes to its owner and
    back, 2(N-1)/N of the data out of each node.
    """
    inside, others = layout.local_ranks > 1, layout.num_nodes - 1
    return LinkShares(
        intra_hops=2 * ceil(log2(layout.local_ranks)),
        intra_bytes=1.0 if inside else 0.0,
        inter_hops=2 * others,
        inter_bytes=2 * others / layout.num_nodes,
    )


_SHARES: dict[str, Callable[[RankLayout], LinkShares]] = {
    "ring": _ring,
    "halving": _halving,
    "tree": _tree,
    "hierarchical": _hierarchical,
}


_FAR = 9.0
_POINTS = 4001


@lru_cache(maxsize=256)
def expected_maximum(count: int) -> float:
    """The mean of the largest of `count` standard normal values.

    The integral of 1 - F^n above 0 less that of F^n below it: exact to about 1e-6 for any count.
    """
    count_of(count, "count")
    grid = np.linspace(-_FAR, _FAR, _POINTS)
    below = np.array([0.5 * (1.0 + erf(x / sqrt(2.0))) for x in grid])
    # F^n by way of its logarithm: F is 1 to the last bit far out, where 1 - F is not.
    above = np.array([0.5 * (1.0 + erf(-x / sqrt(2.0))) for x in grid])
    with np.errstate(divide="ignore"):
        log_below = np.where(grid > 0, np.log1p(-above), np.log(below))
    power = np.exp(count * log_below)
    step = grid[1] - grid[0]
    upper = np.where(grid >= 0, 1.0 - power, 0.0)
    lower = np.where(grid <= 0, power, 0.0)
    middle = _POINTS // 2
    return float(np.trapezoid(upper[middle:], dx=step) - np.trapezoid(lower[: middle + 1], dx=step))


def slowest_of(num_ranks: int, jitter: float) -> float:
    """How many times longer the slowest of this many ranks takes than the average.

    Args:
        num_ranks: All of them meet at every step.
        jitter: Standard deviation of a rank's time, relative, each rank by itself.
    """
    return 1.0 + number_of(jitter, "jitter") * max(0.0, expected_maximum(num_ranks))
