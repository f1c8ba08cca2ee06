"""Pieces of tensors: what a rank holds where no rank holds all of it. Pure.

A state that is sharded over ranks has a `Piece` where it would otherwise have a tensor: what is
here, where that lies in the whole, and the shape of the whole. A piece is a block (an offset in
each dimension) or a run of elements counted in row-major order (one whole number as offset), which
is how flat buffers are cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hpctrain.log import name_ranks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Piece",
    "Region",
    "is_sharded",
    "local_tensor",
    "place_like",
    "regions_of_run",
    "trouble_with_cover",
]

_Shape = tuple[int, ...]
_MOST_NAMED = 4


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is one that ranks hold together: a DTensor, whose class is slow to load."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a sharded tensor; a whole one is all here."""
    return cast("Any", tensor).to_local() if is_sharded(tensor) else tensor


def place_like(local: Tensor, tensor: Tensor) -> Tensor:
    """What this rank holds, as a tensor that lies over the ranks as another does; no copy."""
    if not is_sharded(tensor):
        return local
    like: Any = tensor
    made: Tensor = type(like).from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made


class Region(NamedTuple):
    """A block of a tensor."""

    offset: _Shape
    shape: _Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def overlap(self, other: Region) -> Region | None:
        """What two blocks of one tensor have in common; None: nothing."""
        starts, lengths = [], []
        for a, b, n, m in zip(self.offset, other.offset, self.shape, other.shape, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            starts.append(start)
            lengths.append(stop - start)
        return Region(tuple(starts), tuple(lengths))

    def slices_in(self, outer: Region) -> tuple[slice, ...]:
        """Where it is in an array of the block around it."""
        return tuple(
            slice(start - base, start - base + length)
            for start, base, length in zip(self.offset, outer.offset, self.shape, strict=True)
        )

    def run_in(self, outer: Region) -> range | None:
        """Which elements of the block around it, counted flat; None: they are not consecutive."""
        ones = next((i for i, n in enumerate(self.shape) if n != 1), len(self.shape))
        if self.shape[ones + 1 :] != outer.shape[ones + 1 :]:
            return None
        start = 0
        for at, base, length in zip(self.offset, outer.offset, outer.shape, strict=True):
            start = start * length + at - base
        return range(start, start + self.num_elements)

    def __str__(self) -> str:
        """As in `[0:3, 4:8]`."""
        spans = (f"{a}:{a + n}" for a, n in zip(self.offset, self.shape, strict=True))
        return f"[{', '.join(spans)}]"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A tensor of which this rank holds a part."""

    tensor: Tensor
    """This rank's part. May be empty: every rank has a piece of every sharded tensor."""
    offset: _Shape | int
    """Where it begins in the whole: in each dimension, or as a flat element offset (then `tensor`
    has one dimension)."""
    shape: _Shape
    """Of the whole."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """The blocks that it consists of, one after the other in its own order; none if empty."""
        if self.tensor.numel() == 0:
            return ()
        if isinstance(self.offset, int):
            stop = self.offset + self.tensor.numel()
            return tuple(regions_of_run(self.shape, self.offset, stop))
        return (Region(tuple(self.offset), tuple(self.tensor.shape)),)

    def held(self) -> Iterator[tuple[Region, Tensor]]:
        """Each of its blocks with its elements."""
        if not isinstance(self.offset, int):
            yield from ((region, self.tensor) for region in self.regions)
            return
        start = 0
        for region in self.regions:
            yield region, self.tensor[start : start + region.num_elements].view(region.shape)
            start += region.num_elements

    def mistake(self) -> str | None:
        """What is wrong with it, or None."""
        here, whole = tuple(self.tensor.shape), tuple(self.shape)
        if isinstance(self.offset, int):
            total = math.prod(whole)
            if len(here) != 1:
                return f"a piece of shape {here} with offset {self.offset}; give a flat tensor"
            if not 0 <= self.offset <= self.offset + here[0] <= total:
                return (
                    f"a piece of elements {self.offset} to {self.offset + here[0]} of {total}; it "
                    "must lie inside the whole"
                )
            return None
        if not len(self.offset) == len(here) == len(whole):
            return (
                f"a piece with offset {tuple(self.offset)} and shape {here} of a tensor of shape "
                f"{whole}; all three must have as many dimensions"
            )
        if any(not 0 <= a <= a + n <= m for a, n, m in zip(self.offset, here, whole, strict=True)):
            return (
                f"a piece {Region(tuple(self.offset), here)} of a tensor of shape {whole}; it must "
                "lie inside the whole"
            )
        return None


def regions_of_run(shape: Sequence[int], start: int, stop: int) -> list[Region]:
    """The blocks that consecutive elements of a tensor consist of, in row-major order."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [Region((start,), (stop - start,)) if shape else Region((), ())]
    inner = math.prod(shape[1:])
    rest = (0,) * (len(shape) - 1)

    def within(row: int, low: int, high: int) -> list[Region]:
        return [
            Region((row, *r.offset), (1, *r.shape)) for r in regions_of_run(shape[1:], low, high)
        ]

    first, last = -(-start // inner), stop // inner  # the rows that are complete
    if first > last:
        return within(last, start - last * inner, stop - last * inner)
    found = within(first - 1, start - (first - 1) * inner, inner) if start < first * inner else []
    if first < last:
        found.append(Region((first, *rest), (last - first, *shape[1:])))
    return found + (within(last, 0, stop - last * inner) if stop > last * inner else [])


def trouble_with_cover(shape: Sequence[int], holders: Mapping[Region, Sequence[int]]) -> str | None:
    """Why blocks do not make up a tensor, each element once; None: they do.

    Args:
        shape: Of the tensor.
        holders: By block, the ranks that hold it. Several ranks may hold the same block.
    """
    for one, other in _overlapping(list(holders)):
        return (
            f"{_who(one, holders)} and {_who(other, holders)}, which overlap in part; pieces must "
            "be identical or disjoint"
        )
    found, total = sum(region.num_elements for region in holders), math.prod(shape)
    if found == total:
        return None
    shown = [_who(region, holders) for region in sorted(holders)[:_MOST_NAMED]]
    more = f" and {len(holders) - len(shown)} more pieces" if len(holders) > len(shown) else ""
    return (
        f"only {found} of {total} elements of shape {tuple(shape)} are held: "
        f"{', '.join(shown) or 'by no rank'}{more}; together the pieces must be the whole tensor"
    )


def _who(region: Region, holders: Mapping[Region, Sequence[int]]) -> str:
    ranks = sorted(holders[region])
    verb = "hold" if len(ranks) > 1 else "holds"
    return f"{name_ranks(ranks, limit=_MOST_NAMED)} {verb} {region}"


def _overlapping(regions: Sequence[Region]) -> Iterator[tuple[Region, Region]]:
    """Pairs that have elements in common, found along the dimension that is cut most."""
    if not regions or not regions[0].offset:
        yield from itertools.combinations(regions, 2)
        return
    num_cuts = [len(set(starts)) for starts in zip(*(r.offset for r in regions), strict=True)]
    axis = num_cuts.index(max(num_cuts))
    ordered = sorted(regions, key=lambda region: region.offset[axis])
    for index, region in enumerate(ordered):
        stop = region.offset[axis] + region.shape[axis]
        for other in itertools.islice(ordered, index + 1, None):
            if other.offset[axis] >= stop:
                break
            if region.overlap(other) is not None:
                yield region, other
