"""A rank's part of every global batch of an epoch, and where an epoch stands. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from hpctrain.data.batches import Batching, part_of
from hpctrain.data.partition import cyclic
from hpctrain.data.source import Indices

__all__ = ["Part", "Seat", "plan_parts"]

_CHUNK = 8192
"""Indices that are computed together: few calls of numpy, and all of it stays in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Who takes part of the batches: one rank of so many."""

    rank: int
    num_ranks: int
    weights: tuple[float, ...] | None = None
    """How much of a batch each rank has; None deals them out evenly."""

    def part_of(self, batch: range) -> range:
        """This rank's positions in a global batch."""
        return part_of(batch, self.num_ranks, self.rank, self.weights)


class Part(NamedTuple):
    """This rank's part of one global batch."""

    stop: int
    """Samples of the epoch that are consumed with this batch, over all ranks."""
    global_samples: int
    num_samples: int
    """How many of them are this rank's; 0 where there are fewer samples than ranks."""


def plan_parts(
    batching: Batching,
    seat: Seat,
    look_up: Callable[[Indices], Indices],
    *,
    start: int,
    num_samples: int,
) -> Iterator[tuple[Part, Indices]]:
    """Every batch that is left of an epoch, as this rank sees it.

    Args:
        batching: How the epoch is cut.
        seat: Whose parts are asked for.
        look_up: From positions in the epoch to what the source takes.
        start: Samples that are consumed already.
        num_samples: Samples in the epoch.

    Yields:
        The part, and what to take for it.
    """
    cuts = batching.cut(start, num_samples)
    per_chunk = max(1, _CHUNK * seat.num_ranks // batching.global_batch)
    while chunk := list(islice(cuts, per_chunk)):
        positions, counts = _even(seat, chunk) if seat.weights is None else _uneven(seat, chunk)
        wanted = look_up(positions)
        first = 0
        for batch, count in zip(chunk, counts, strict=True):
            yield Part(batch.stop, len(batch), count), wanted[first : first + count]
            first += count


def _even(seat: Seat, chunk: Sequence[range]) -> tuple[Indices, list[int]]:
    """A rank's positions in neighbouring batches are one progression."""
    rank, size = seat.rank, seat.num_ranks
    mine = cyclic(chunk[-1].stop, size, rank, start=chunk[0].start)
    # (x - rank - 1) // size + 1 of the rank's positions are below x
    counts = [(b.stop - rank - 1) // size - (b.start - rank - 1) // size for b in chunk]
    return np.arange(mine.start, mine.stop, mine.step, dtype=np.int64), counts


def _uneven(seat: Seat, chunk: Sequence[range]) -> tuple[Indices, list[int]]:
    mine = [seat.part_of(batch) for batch in chunk]
    positions = np.concatenate([np.arange(p.start, p.stop, dtype=np.int64) for p in mine])
    return positions, [len(part) for part in mine]
