"""Which nodes fall out of line. Pure.

A value is an outlier when it is worse than the median of all and either

- worse by more than a fifth: below 80 % of the median, or
- among 8 values or more, worse by more than 6 scaled median absolute deviations (MAD x 1.4826,
  which is the standard deviation where values scatter normally), and by at least 5 %.

The first rule needs no scatter to be known, so it works from two nodes on. The second finds the
node that is 10 % slow among hundreds that agree within 1 %; its floor keeps it from naming nodes
that are only 1 % slow, and below 8 values the MAD says little: of three, two that happen to agree
make it nearly nothing. Neither is led astray by the outliers themselves, as a mean would be.

A node's link value is the upper median over its links: a good node next to a bad one keeps the
value of its good links. A link is named when it has less than half of what both of its ends have
otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.doctor.nodes.report import NodeLink, NodeReport

__all__ = ["Outlier", "find_clocks_off", "find_low", "find_outliers", "find_slow_links"]

FRACTION = 0.8
NUM_DEVIATIONS = 6.0
FLOOR = 0.05
FEWEST_FOR_MAD = 8
LINK_FRACTION = 0.5
CLOCK_BOUND_S = 0.1
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """Something that falls out of line, in numbers and words."""

    hosts: tuple[str, ...]
    quantity: str
    value: float | None
    typical: float | None
    text: str
    cure: str


def find_low(values: Sequence[float]) -> list[int]:
    """Find the values that are outliers on the low side, by their positions."""
    if len(values) < 2:
        return []
    middle = statistics.median(values)
    limit = FRACTION * middle
    if len(values) >= FEWEST_FOR_MAD:
        sigma = _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)
        limit = max(limit, min(middle - NUM_DEVIATIONS * sigma, (1 - FLOOR) * middle))
    return [i for i, value in enumerate(values) if value < limit]


def find_slow_links(links: Sequence[NodeLink], typical: Mapping[int, float]) -> list[NodeLink]:
    """Find links far below what both of their ends have otherwise.

    Args:
        links: All links that were measured.
        typical: Node -> the bandwidth of its typical link.
    """
    return [
        link
        for link in links
        if link.bandwidth is not None
        and link.bandwidth < LINK_FRACTION * min(typical[link.a], typical[link.b])
    ]


def find_clocks_off(offsets: Sequence[tuple[float, float] | None]) -> dict[int, float]:
    """Find clocks away from the others' by more than the bound, whatever the measuring error.

    Args:
        offsets: Per node (seconds ahead of node 0, error); None where it could not be measured.

    Returns:
        Node -> seconds ahead of the others' median; of two nodes, ahead of the first.
    """
    known = [offset for offset, _ in filter(None, offsets)]
    middle = statistics.median_low(known) if len(known) > 2 else 0.0
    return {
        node: pair[0] - middle
        for node, pair in enumerate(offsets)
        if pair is not None and abs(pair[0] - middle) - pair[1] > CLOCK_BOUND_S
    }


# quantity -> (its name for people, unit, cure)
_QUANTITIES: Mapping[str, tuple[str, str, str]] = {
    "gflops": (
        "matrix product",
        "GFLOP/s",
        "look for other processes, a power cap, heat, fewer cores or threads there; else leave the "
        "node out (Slurm: --exclude)",
    ),
    "memory": (
        "memory bandwidth",
        "GB/s",
        "look for other processes, a missing memory module or ranks bound to one NUMA domain",
    ),
    "network": (
        "link bandwidth",
        "MB/s",
        "have its cable, port and adapter checked (`ibstat`, `ethtool`); until then leave the node "
        "out (Slurm: --exclude)",
    ),
}


def find_outliers(nodes: Sequence[NodeReport], links: Sequence[NodeLink]) -> list[Outlier]:
    """Name everything that falls out of line, nodes first, then links."""
    found: list[Outlier] = []
    for quantity, (words, unit, cure) in _QUANTITIES.items():
        known = [
            (node.host, value) for node in nodes if (value := getattr(node, quantity)) is not None
        ]
        middle = statistics.median(value for _, value in known) if known else 0.0
        for position in find_low([value for _, value in known]):
            host, value = known[position]
            found.append(
                Outlier(
                    hosts=(host,),
                    quantity=quantity,
                    value=value,
                    typical=middle,
                    text=f"{host}: {words} {value:.4g} {unit}, {value / middle:.0%} of the median "
                    f"({middle:.4g})",
                    cure=cure,
                )
            )
    return found + _clock_outliers(nodes) + _link_outliers(nodes, links)


def _clock_outliers(nodes: Sequence[NodeReport]) -> list[Outlier]:
    offsets = [
        None if node.clock_s is None else (node.clock_s, node.clock_error_s) for node in nodes
    ]
    return [
        Outlier(
            hosts=(nodes[i].host,),
            quantity="clock",
            value=ahead_s,
            typical=None,
            text=f"{nodes[i].host}: its clock is off by {ahead_s:+.3f} s",
            cure="have the node's time service fixed; logs and traces will not line up",
        )
        for i, ahead_s in find_clocks_off(offsets).items()
    ]


def _link_outliers(nodes: Sequence[NodeReport], links: Sequence[NodeLink]) -> list[Outlier]:
    typical = {i: node.network for i, node in enumerate(nodes) if node.network is not None}
    measured = [link for link in links if link.a in typical and link.b in typical]
    silent = [
        Outlier(
            hosts=(nodes[link.a].host, nodes[link.b].host),
            quantity="link",
            value=None,
            typical=None,
            text=f"{nodes[link.a].host} and {nodes[link.b].host} could not exchange messages in "
            "time",
            cure="check the network, its firewall and which interface MPI takes between the two",
        )
        for link in links
        if link.bandwidth is None
    ]
    slow = [
        Outlier(
            hosts=(nodes[link.a].host, nodes[link.b].host),
            quantity="link",
            value=link.bandwidth,
            typical=min(typical[link.a], typical[link.b]),
            text=f"{nodes[link.a].host} to {nodes[link.b].host}: {link.bandwidth:.4g} MB/s, though "
            f"both have {min(typical[link.a], typical[link.b]):.4g} or more with other nodes",
            cure="a network path is bad or busy; measure again, then report it to the site",
        )
        for link in find_slow_links(measured, typical)
    ]
    return silent + slow
