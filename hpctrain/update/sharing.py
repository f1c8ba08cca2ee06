"""Which rank of a node updates which piece of which parameter. Pure.

Parameters are laid end to end and cut into as many cells as the largest node has ranks, so that
every node, whatever the number of its ranks, computes the same pieces: a piece of another length
may round differently in its last elements. A rank takes neighbouring cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Fragment", "cut_elements", "divide_parameters"]

_GRAIN = 1024
"""Cuts are at multiples of this many elements of a parameter: whole vectors, whole cache lines."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of the elements of a parameter, in the order in which they lie in memory."""

    parameter: int
    start: int
    stop: int


def cut_elements(
    sizes: Sequence[int], weights: Sequence[int], *, num_cells: int, num_ranks: int
) -> list[list[Fragment]]:
    """Cut parameters into cells of about equal weight; each rank's fragments, in order.

    Args:
        sizes: Elements of each parameter.
        weights: Bytes of one element of each parameter.
        num_cells: The ranks of the largest node.
        num_ranks: The ranks of this node.
    """
    total = sum(size * weight for size, weight in zip(sizes, weights, strict=True))
    by_rank: list[list[Fragment]] = [[] for _ in range(num_ranks)]
    cell, done = 0, 0
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        start = 0
        if not size:  # has state and a step count like any other
            by_rank[cell * num_ranks // num_cells].append(Fragment(index, 0, 0))
        while start < size:
            stop = size
            if cell < num_cells - 1:
                left = total * (cell + 1) // num_cells - done
                stop = _nearest_cut(start + left // weight, start, size)
            if stop > start:
                by_rank[cell * num_ranks // num_cells].append(Fragment(index, start, stop))
                done += (stop - start) * weight
                start = stop
            if start < size:  # the cell is as full as a cut here can make it
                cell += 1
    return by_rank


def _nearest_cut(wanted: int, start: int, size: int) -> int:
    """Where a parameter can be cut, next to where it should be."""
    if wanted >= size:
        return size
    below = max(start, wanted // _GRAIN * _GRAIN)
    above = min(size, below + _GRAIN) if below // _GRAIN * _GRAIN == below else size
    return below if wanted - below < above - wanted else above


def divide_parameters(sizes: Sequence[int], *, num_ranks: int) -> list[list[Fragment]]:
    """Give each rank whole parameters, the largest first to whoever has least so far."""
    by_rank: list[list[Fragment]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = load.index(min(load))
        by_rank[rank].append(Fragment(index, 0, sizes[index]))
        load[rank] += sizes[index] + 1
    return [sorted(part, key=lambda f: f.parameter) for part in by_rank]
