"""Which rank stands where in the grid, by the nodes that they are on. Pure.

Ranks that share a layer (tensor) talk most, so they are on one node; then the stages of a pipeline
are neighbours; ranks along the data dimension may be far apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.errors import ConfigError
from hpctrain.grid.factoring import DIMENSIONS, Coordinate, Shape
from hpctrain.log import table

__all__ = ["Placement", "place"]

_MOST_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A grid: the rank at every coordinate."""

    shape: Shape
    order: tuple[int, ...]
    """Ranks in the order of their coordinates, the last dimension fastest."""
    nodes: tuple[int, ...]
    """The node of each rank."""

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.order)}

    def coordinate(self, rank: int) -> Coordinate:
        """Where a rank stands."""
        rest, tensor = divmod(self._positions[rank], self.shape.tensor)
        data, pipeline = divmod(rest, self.shape.pipeline)
        return Coordinate(data, pipeline, tensor)

    def rank(self, at: Coordinate) -> int:
        """Who stands at a coordinate."""
        _, pipeline, tensor = self.shape
        return self.order[(at.data * pipeline + at.pipeline) * tensor + at.tensor]

    def group(self, rank: int, dims: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from a rank in these dimensions only, ordered by coordinate."""
        own = self.coordinate(rank)
        ways = [
            range(size) if dim in dims else (here,)
            for dim, size, here in zip(DIMENSIONS, self.shape, own, strict=True)
        ]
        return tuple(
            self.rank(Coordinate(data, pipeline, tensor))
            for data in ways[0]
            for pipeline in ways[1]
            for tensor in ways[2]
        )

    def groups(self, dims: Sequence[str]) -> list[tuple[int, ...]]:
        """All groups along these dimensions, ordered by coordinate."""
        return list(dict.fromkeys(self.group(rank, dims) for rank in self.order))

    def num_nodes(self, dim: str) -> int:
        """The most nodes that a group along a dimension spans."""
        return max(len({self.nodes[rank] for rank in group}) for group in self.groups((dim,)))

    def describe(self, hosts: Sequence[str]) -> str:
        """Draw the grid as a table, one row for each group of ranks that share layers.

        Args:
            hosts: The name of each node.
        """
        count = "1 rank" if self.shape.size == 1 else f"{self.shape.size} ranks"
        title = f"grid of {count}: " + " x ".join(
            f"{dim} {size}" for dim, size in zip(DIMENSIONS, self.shape, strict=True)
        )
        rows = []
        for group in self.groups(("tensor",)):
            at = self.coordinate(group[0])
            places = dict.fromkeys(hosts[self.nodes[rank]] for rank in group)
            rows.append((at.data, at.pipeline, " ".join(map(str, group)), ", ".join(places)))
        header = ("data", "pipeline", "ranks by tensor", "node")
        text = table(header, rows[:_MOST_ROWS], title=title)
        if len(rows) > _MOST_ROWS:
            text += f"\n ... and {len(rows) - _MOST_ROWS} more rows"
        spans = [
            f"{dim} groups {_where(self.num_nodes(dim))}"
            for dim, size in zip(DIMENSIONS, self.shape, strict=True)
            if size > 1
        ]
        return text + (f"\n{'; '.join(spans)}" if spans else "")


def place(shape: Shape, nodes: Sequence[int], hosts: Sequence[str] = ()) -> Placement:
    """Give every rank its place.

    Args:
        shape: From `fit_shape`, of as many ranks as there are.
        nodes: The node of each rank.
        hosts: The nodes' names, for messages.

    Raises:
        ConfigError: nodes have different numbers of ranks, or numbers that tensor groups do not
            fill, or ranks are numbered across nodes in no regular way.
    """
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    if shape.tensor > 1:
        _check_nodes(shape, by_node, hosts)
    ordered = [rank for node in sorted(by_node) for rank in by_node[node]]
    block = shape.pipeline * shape.tensor
    blocks = [tuple(ordered[start : start + block]) for start in range(0, len(ordered), block)]
    placement = Placement(
        shape=shape,
        order=tuple(rank for ranks in sorted(blocks) for rank in ranks),
        nodes=tuple(nodes),
    )
    for dim in DIMENSIONS:
        if any(list(group) != sorted(group) for group in placement.groups((dim,))):
            raise ConfigError(
                f"Grid: {shape} on these nodes has a {dim} group whose ranks do not ascend, as "
                "torch needs them: ranks are numbered irregularly across nodes; start them node "
                "by node (srun --distribution=block, mpirun --map-by core)"
            )
    return placement


def _check_nodes(shape: Shape, by_node: dict[int, list[int]], hosts: Sequence[str]) -> None:
    """Tensor groups stay inside a node, or fill whole nodes."""
    sizes = {node: len(ranks) for node, ranks in by_node.items()}
    even = len(set(sizes.values())) == 1
    each = next(iter(sizes.values()))
    if even and shape.tensor > each and shape.tensor % each == 0:
        return
    for node, size in sizes.items():
        if size % shape.tensor:
            name = f" ({hosts[node]})" if hosts else ""
            fitting = [
                t
                for t in range(1, min(sizes.values()) + 1)
                if all(s % t == 0 for s in sizes.values())
            ]
            raise ConfigError(
                f"Grid: tensor={shape.tensor} does not divide the {size} ranks of node {node}"
                f"{name}, so a tensor group would span nodes unevenly; choose tensor="
                f"{' or '.join(map(str, fitting))}, or give each node as many ranks"
            )


def _where(num_nodes: int) -> str:
    return "are within a node" if num_nodes == 1 else f"span {num_nodes} nodes"
