"""Who reads which files, or which rows of them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.data.partition import block
from hpctrain.errors import ConfigError

__all__ = ["Span", "file_spans", "whole_files"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Neighbouring rows of one file."""

    file: int
    start: int
    stop: int


def file_spans(sizes: Sequence[int], num_parts: int, part: int) -> list[Span]:
    """The rows of a part: sizes differ by at most one, and a file may be shared by neighbours.

    Args:
        sizes: Rows in each file.
        num_parts: How many share them.
        part: Whose rows are asked for.
    """
    _check(sizes)
    mine = block(sum(sizes), num_parts, part)
    spans = []
    first = 0  # the row, over all files, that the file begins with
    for file, size in enumerate(sizes):
        start, stop = max(mine.start - first, 0), min(mine.stop - first, size)
        if start < stop:
            spans.append(Span(file=file, start=start, stop=stop))
        first += size
    return spans


def whole_files(sizes: Sequence[int], num_parts: int, part: int) -> list[int]:
    """The files of a part, none of them shared: the largest first, to whoever has the least.

    The parts differ by no more rows than the largest file has.
    """
    _check(sizes)
    block(0, num_parts, part)  # the same rules for parts
    loads = [(0, owner) for owner in range(num_parts)]
    mine = []
    for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
        load, owner = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[file], owner))
        if owner == part:
            mine.append(file)
    return sorted(mine)


def _check(sizes: Sequence[int]) -> None:
    if any(size < 0 for size in sizes):
        raise ConfigError(f"sizes={list(sizes)} must not be negative")
