"""Who shares memory: all ranks of a node, or those of each of its NUMA domains.

Where a node has several domains and its ranks are bound to them, one memory for all would make
every rank read most of what it adds up from another domain. With one memory a domain, only sums
go across, as they do between nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hpctrain.world import CoreMap, read_affinity, read_core_map

__all__ = ["divides_nodes", "domain_here", "domain_of"]


def domain_of(cpus: Iterable[int], core_map: CoreMap) -> int | None:
    """The NUMA domain that has all of these CPUs; None: they are of several. Pure."""
    domains = {core_map.domain_of.get(cpu) for cpu in cpus}
    return domains.pop() if len(domains) == 1 else None


def divides_nodes(places: Sequence[tuple[int, int | None]]) -> bool:
    """Whether each NUMA domain gets memory of its own; the same on every rank. Pure.

    Only where it can pay: every rank is bound to one domain, some node has several, and no rank
    would be left without another one to share with.

    Args:
        places: Of every rank: which node it is on, by any number, and its domain.
    """
    if any(domain is None for _, domain in places):
        return False
    num_ranks = Counter(places)
    num_nodes = len({node for node, _ in places})
    return len(num_ranks) > num_nodes and min(num_ranks.values()) > 1


def domain_here() -> int | None:
    """The NUMA domain that this process is bound to; None: to none alone."""
    return domain_of(read_affinity(), read_core_map())
