"""Ways to arrange N ranks: data x pipeline x tensor, who is whose neighbour, stages. Pure.

Ranks of a tensor group are neighbours, so that they stay inside a node; then come the stages of a
pipeline; ranks with the same part of the model are farthest apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd, inf
from typing import Literal, NamedTuple, get_args

from hpctrain.errors import ConfigError
from hpctrain.predict.costs import RankLayout
from hpctrain.predict.machine import Costs, Link
from hpctrain.tables import count_of

__all__ = [
    "SCHEDULES",
    "GridShape",
    "Group",
    "ScheduleName",
    "balance",
    "factorings",
    "group_of",
    "in_flight",
    "shared_link",
]

ScheduleName = Literal["1f1b", "gpipe"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class GridShape(NamedTuple):
    """The sizes of a grid."""

    data: int
    pipeline: int
    tensor: int

    @property
    def num_ranks(self) -> int:
        """How many ranks it takes."""
        return self.data * self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"data={self.data}, pipeline={self.pipeline}, tensor={self.tensor}"


def factorings(num_ranks: int) -> list[GridShape]:
    """Every way to write a number of ranks as data x pipeline x tensor, most data first."""
    count_of(num_ranks, "num_ranks")
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    return [
        GridShape(data, pipeline, num_ranks // data // pipeline)
        for data in reversed(divisors)
        for pipeline in reversed(divisors)
        if (num_ranks // data) % pipeline == 0
    ]


def in_flight(schedule: ScheduleName, micro_batches: int, num_stages: int, stage: int) -> int:
    """Micro-batches whose activations a stage holds at the most."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule={schedule!r}; choose one of {', '.join(SCHEDULES)}")
    if num_stages == 1:
        return 1  # backward follows at once
    return micro_batches if schedule == "gpipe" else min(micro_batches, num_stages - stage)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
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


def group_of(size: int, stride: int, layout: RankLayout) -> Group:
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
    return Group(
        layout=RankLayout(num_ranks=size, ranks_per_node=local),
        sharing=max(1, per_node // local),
    )


def balance(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Cut a row of units so that the stage that costs most costs as little as possible.

    Exact, by dynamic programming. Of equal cuts the first, so that everyone gets the same.

    Raises:
        ConfigError: there are fewer units than stages.
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise ConfigError(f"{count} units do not make {num_stages} stages")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # By units so far: the least that the costliest stage costs, and where the last one begins.
    best = [0.0, *([inf] * count)]
    begins: list[list[int]] = []
    for _ in range(num_stages):
        after, begin = [inf] * (count + 1), [0] * (count + 1)
        for stop in range(1, count + 1):
            for start in range(stop):
                worst = max(best[start], sums[stop] - sums[start])
                if best[start] < inf and worst < after[stop]:
                    after[stop], begin[stop] = worst, start
        best, begins = after, [*begins, begin]
    ends = [count]
    for begin in reversed(begins):
        ends.append(begin[ends[-1]])
    ends.reverse()
    return tuple(range(start, stop) for start, stop in pairwise(ends))
