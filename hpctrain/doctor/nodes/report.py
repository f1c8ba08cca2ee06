"""What was measured of each node and link, and how it is put together. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NodeLink", "NodeReport", "RankReport", "put_together"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank measured on its own device."""

    node: int
    host: str
    device: str
    num_threads: int
    gflops: float
    memory: float
    """GB/s, read and written, while all ranks of the node copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLink:
    """What two nodes measured together; None where a message did not arrive in time."""

    a: int
    b: int
    bandwidth: float | None
    """MB/s, one way."""
    latency: float | None
    """Microseconds, one way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """One node, as its slowest rank and its typical link show it."""

    host: str
    num_ranks: int
    device: str
    num_threads: int
    gflops: float
    """Of its slowest rank, for which all others wait."""
    memory: float
    """GB/s of a rank, on average."""
    network: float | None
    """MB/s of its typical link; None on one node."""
    latency: float | None
    clock_s: float | None
    """Seconds ahead of the first node."""
    clock_error_s: float = 0.0


def put_together(
    ranks: Sequence[RankReport],
    links: Sequence[NodeLink],
    clocks: Sequence[tuple[float, float] | None],
) -> list[NodeReport]:
    """Make one report per node from what all ranks, links and clocks gave."""
    reports = []
    for node in sorted({rank.node for rank in ranks}):
        own = [rank for rank in ranks if rank.node == node]
        ends = [link for link in links if node in (link.a, link.b)]
        bandwidths = [link.bandwidth for link in ends if link.bandwidth is not None]
        latencies = [link.latency for link in ends if link.latency is not None]
        clock = clocks[node] if node < len(clocks) else None
        reports.append(
            NodeReport(
                host=own[0].host,
                num_ranks=len(own),
                device=own[0].device,
                num_threads=min(rank.num_threads for rank in own),
                gflops=min(rank.gflops for rank in own),
                memory=statistics.fmean(rank.memory for rank in own),
                # Upper and lower median: a bad partner does not spoil a good node.
                network=statistics.median_high(bandwidths) if bandwidths else None,
                latency=statistics.median_low(latencies) if latencies else None,
                clock_s=clock[0] if clock else None,
                clock_error_s=clock[1] if clock else 0.0,
            )
        )
    return reports
