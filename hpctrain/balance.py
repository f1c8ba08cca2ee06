"""Things of different sizes, dealt to parts so that the parts are about equally large. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["largest_first"]


def largest_first(
    sizes: Sequence[int], num_parts: int, already: Sequence[int] = ()
) -> list[list[int]]:
    """Deal the largest first, each to the part that has least so far.

    The parts differ by no more than the largest thing. Equal sizes go in order, to the first of
    equal parts, so that all ranks compute the same.

    Args:
        sizes: Of each thing.
        num_parts: How many parts.
        already: By part: how much it has before; none: nothing.

    Returns:
        By part: the indices of its things, ascending.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(load, part) for part, load in enumerate(already or [0] * num_parts)]
    heapq.heapify(loads)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, part = heapq.heappop(loads)
        parts[part].append(index)
        heapq.heappush(loads, (load + sizes[index], part))
    return [sorted(part) for part in parts]
