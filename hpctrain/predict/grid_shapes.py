"""Ranks of a grid on nodes: which of them communicate, and what they share; schedules. Pure.

Ranks of a tensor group are neighbours, so that they stay inside a node; then come the stages of a
pipeline; ranks with the same part of the model are farthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal, get_args

from hpctrain.errors import ConfigError
from hpctrain.predict.costs import RankLayout
from hpctrain.predict.machine import Costs, Link

__all__ = [
    "SCHEDULES",
    "RankGroup",
    "ScheduleName",
    "group_of",
    "in_flight",
    "shared_link",
]

ScheduleName = Literal["1f1b", "gpipe"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def in_flight(schedule: ScheduleName, micro_batches: int, num_stages: int, stage: int) -> int:
    """Micro-batches whose activations a stage holds at the most."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule={schedule!r}; choose one of {', '.join(SCHEDULES)}")
    if num_stages == 1:
        return 1  # backward follows at once
    return micro_batches if schedule == "gpipe" else min(micro_batches, num_stages - stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """Ranks that communicate, all such groups of the grid at the same time."""

    layout: RankLayout
    """Its own ranks on nodes."""
    sharing: int
    """How many groups share a node's link to others."""

    def costs(self, costs: Costs) -> Costs:
        """What a collective costs while the node's other groups use the link as well."""
        return replace(costs, inter=shared_link(costs.inter, self.sharing))


def shared_link(link: Link, sharing: int) -> Link:
    """A link that several use at the same time."""
    return replace(link, bytes_per_s=link.bytes_per_s / sharing)


def group_of(size: int, stride: int, layout: RankLayout) -> RankGroup:
    """The groups of ranks that are `stride` apart.

    Args:
        size: Of each group.
        stride: From one of its ranks to the next.
        layout: All ranks on nodes.
    """
    per_node = layout.local_ranks
    if layout.num_nodes == 1:
        local = size
    else:  # a group that does not end where a node ends is cut on some node
        local = min(size, max(1, gcd(per_node, stride * size) // stride))
    return RankGroup(
        layout=RankLayout(num_ranks=size, ranks_per_node=local),
        sharing=max(1, per_node // local),
    )
