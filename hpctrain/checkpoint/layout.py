"""Who writes what: pure arithmetic, the same on every rank.

A parallel file system gives a node more when a few processes write, and less when thousands of
small files are made at once; so a few ranks of each node write, and none for little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.balance import largest_first
from hpctrain.pieces import Region

__all__ = [
    "LEAST_PART_BYTES",
    "MOST_PARTS",
    "MOST_PER_NODE",
    "Item",
    "Source",
    "TensorSlice",
    "assign",
    "choose_ranks",
    "divide",
    "writer_of",
]

MOST_PER_NODE = 4
"""One process rarely saturates a node's file system link; more than four only add files."""
LEAST_PART_BYTES = 64 << 20
"""Below it creating, syncing and closing a file costs more than a second writer saves."""
MOST_PARTS = 256
"""This many streams saturate known file systems; more files only load the directory."""


Source = str | tuple[str, Region]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A tensor to be written."""

    name: str
    num_elements: int
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return self.num_elements * self.element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlice:
    """Elements of a tensor, counted as if it were flat, that one writer writes."""

    name: str
    start: int
    stop: int
    element_bytes: int
    is_whole: bool
    region: Region | None = None
    """The block of the tensor that the elements are counted in; None: all of it."""

    @property
    def num_bytes(self) -> int:
        """Of these elements."""
        return (self.stop - self.start) * self.element_bytes

    @property
    def key(self) -> str:
        """What it is called in its file."""
        if self.region is not None:
            return f"{self.name}{self.region}"
        return self.name if self.is_whole else f"{self.name}[{self.start}:{self.stop}]"

    @property
    def source(self) -> Source:
        """What it is copied from: a whole tensor, or a block that a rank holds."""
        return self.name if self.region is None else (self.name, self.region)


def choose_ranks(
    node_of: Sequence[int], num_bytes: int, per_node: int | None = None
) -> tuple[int, ...]:
    """Which ranks write (or read) this many bytes; rank 0 is the first of them.

    Args:
        node_of: The node of each rank.
        num_bytes: What there is to write.
        per_node: This many on each node, if it has as many ranks; None: at most `MOST_PER_NODE`, at
            most `MOST_PARTS` in all, and no more than make parts of `LEAST_PART_BYTES`.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        ranks_of.setdefault(node, []).append(rank)
    chosen: list[tuple[int, int, int]] = []
    for ranks in ranks_of.values():
        count = min(len(ranks), MOST_PER_NODE if per_node is None else per_node)
        # Apart from each other: adjacent cores often share a memory controller.
        places = [ranks[i * len(ranks) // count] for i in range(count)]
        chosen += [(turn, ranks[0], rank) for turn, rank in enumerate(places)]
    ordered = [rank for _, _, rank in sorted(chosen)]  # one of each node, then a second of each
    if per_node is None:
        ordered = ordered[: max(1, min(MOST_PARTS, num_bytes // LEAST_PART_BYTES))]
    return tuple(ordered)


def writer_of(node_of: Sequence[int], writers: Sequence[int]) -> list[int]:
    """For each rank the part that gets its own state: on its node if that has a writer."""
    on_node: dict[int, list[int]] = {}
    for part, rank in enumerate(writers):
        on_node.setdefault(node_of[rank], []).append(part)
    everyone = list(range(len(writers)))
    met: dict[int, int] = {}
    parts = []
    for node in node_of:
        turn = met.get(node, 0)
        met[node] = turn + 1
        near = on_node.get(node)
        parts.append(near[turn % len(near)] if near else everyone[(node + turn) % len(everyone)])
    return parts


def assign(
    holders: Mapping[tuple[str, Region], Sequence[int]],
    element_bytes: Mapping[str, int],
    node_of: Sequence[int],
    writers: Sequence[int],
) -> tuple[list[list[TensorSlice]], dict[Source, int]]:
    """Who writes each block of the tensors that are in pieces, once.

    A writer that holds a block writes it; where none does, one of a holder's node gets it sent.

    Args:
        holders: By tensor and block, the ranks that hold it.
        element_bytes: By tensor.
        node_of: The node of each rank.
        writers: The rank that writes each part.

    Returns:
        By part, what it has to write; by tensor and block, the rank that has it.
    """
    part_of = {rank: part for part, rank in enumerate(writers)}
    on_node: dict[int, list[int]] = {}
    for part, rank in enumerate(writers):
        on_node.setdefault(node_of[rank], []).append(part)
    parts_of: list[list[TensorSlice]] = [[] for _ in writers]
    sources: dict[Source, int] = {}
    loads = [0] * len(writers)
    for key in sorted(holders, key=lambda key: (-key[1].num_elements, key)):
        name, region = key
        segment = TensorSlice(
            name=name,
            start=0,
            stop=region.num_elements,
            element_bytes=element_bytes[name],
            is_whole=True,
            region=region,
        )
        ranks = sorted(holders[key])
        parts = [part_of[rank] for rank in ranks if rank in part_of]
        parts = parts or [part for rank in ranks for part in on_node.get(node_of[rank], ())]
        part = min(parts or range(len(writers)), key=lambda part: (loads[part], part))
        loads[part] += segment.num_bytes
        parts_of[part].append(segment)
        writer = writers[part]
        near = [rank for rank in ranks if node_of[rank] == node_of[writer]]
        sources[key] = writer if writer in ranks else (near or ranks)[0]
    return parts_of, sources


def divide(
    items: Iterable[Item], num_parts: int, assigned: Sequence[Sequence[TensorSlice]] = ()
) -> list[list[TensorSlice]]:
    """Share tensors among writers so that all have about equally many bytes.

    Tensors are kept whole, except those that are larger than a writer's share. In each part wide
    elements come first, so that everything is aligned to its own width.

    Args:
        items: Whole tensors, which any writer has.
        num_parts: How many writers there are.
        assigned: By part, what it has to write already.
    """
    ordered = sorted(items, key=lambda item: (-item.num_bytes, item.name))
    share = max(LEAST_PART_BYTES, -(-sum(item.num_bytes for item in ordered) // num_parts))
    segments = [segment for item in ordered for segment in _cut(item, share)]
    segments.sort(key=lambda segment: (-segment.num_bytes, segment.name, segment.start))
    parts = [list(given) for given in assigned] or [[] for _ in range(num_parts)]
    already = [sum(segment.num_bytes for segment in given) for given in parts]
    shares = largest_first([segment.num_bytes for segment in segments], num_parts, already)
    for part, indices in enumerate(shares):
        parts[part] += [segments[index] for index in indices]
    for in_part in parts:
        in_part.sort(key=_place_in_file)
    return parts


def _place_in_file(segment: TensorSlice) -> tuple[object, ...]:
    return -segment.element_bytes, segment.name, segment.region or (), segment.start


def _cut(item: Item, share: int) -> list[TensorSlice]:
    count = 1 if item.num_bytes <= share else math.ceil(item.num_bytes / share)
    bounds = [item.num_elements * i // count for i in range(count + 1)]
    return [
        TensorSlice(
            name=item.name,
            start=bounds[i],
            stop=bounds[i + 1],
            element_bytes=item.element_bytes,
            is_whole=count == 1,
        )
        for i in range(count)
    ]
