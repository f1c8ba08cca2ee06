"""How data are cut for the way between ranks: by rows into chunks, by bytes into messages. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

__all__ = [
    "MESSAGE_BYTES",
    "check_chunk",
    "share_length",
    "split_bytes",
    "split_rows",
]

MESSAGE_BYTES = 2**30
"""The most bytes in one message: counts in MPI 3 have 31 bits."""

_LEAST_CHUNK_BYTES = 16


def share_length(total: int, rank: int, size: int) -> int:
    """How many of the positions 0 .. total-1 a rank owns cyclically. Pure."""
    return len(range(rank, total, size))


def split_bytes(num_bytes: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut bytes into ranges of at most `limit`; nothing when there are none. Pure."""
    for start in range(0, num_bytes, limit):
        yield start, min(start + limit, num_bytes)


def split_rows(
    sizes: int | np.ndarray, num_rows: int, limit_bytes: int
) -> Iterator[tuple[int, int]]:
    """Cut rows into ranges that hold at most `limit_bytes`, and at least one row. Pure.

    Args:
        sizes: Bytes of every row, or of each.
        num_rows: How many rows there are.
        limit_bytes: The most bytes in a range, where one row is not larger already.
    """
    if isinstance(sizes, int):
        step = max(1, limit_bytes // sizes) if sizes > 0 else max(1, num_rows)
        yield from split_bytes(num_rows, step)
        return
    ends = np.cumsum(sizes, dtype=np.int64)
    start = 0
    while start < num_rows:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + limit_bytes, side="right"))
        stop = min(max(stop, start + 1), num_rows)
        yield start, stop
        start = stop


def check_chunk(chunk_bytes: int) -> str | None:
    """What is wrong with a chunk size, or None. Pure."""
    if chunk_bytes < _LEAST_CHUNK_BYTES:
        return f"chunk_bytes={chunk_bytes} must be at least {_LEAST_CHUNK_BYTES}"
    return None
