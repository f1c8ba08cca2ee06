"""Who has which samples: parts, files, batches, and a rank's part of every batch. Pure.

Every function answers for one part (a rank, usually) without looking at the others, for any number
of samples: 0, or fewer than parts, gives some parts nothing. Parts are ranges where possible,
so that 10^12 samples cost no memory.

Where a global batch ends depends on how many samples are left and on nothing else: not on the
ranks, nor on where a resumed run began. So the same batches come out of every number of ranks, and
after every stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from math import isfinite
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hpctrain.balance import largest_first
from hpctrain.errors import ConfigError

__all__ = [
    "Batching",
    "Indices",
    "Part",
    "Seat",
    "Span",
    "block",
    "cyclic",
    "file_spans",
    "part_of",
    "plan_parts",
    "quotas",
    "split",
    "stratified",
    "weighted",
    "whole_files",
]


Indices: TypeAlias = npt.NDArray[np.int64]
"""Which samples, in which order."""


def block(num_samples: int, num_parts: int, part: int) -> range:
    """Contiguous parts; sizes differ by at most one, the larger ones come first."""
    _check(num_samples, num_parts, part)
    size, larger = divmod(num_samples, num_parts)
    start = part * size + min(part, larger)
    return range(start, start + size + (part < larger))


def cyclic(num_samples: int, num_parts: int, part: int, *, start: int = 0) -> range:
    """Dealt like cards: position p belongs to part `p % num_parts`; sizes differ by at most one.

    Args:
        num_samples: Positions end here.
        num_parts: How many share them.
        part: Which part.
        start: Positions begin here; who has which does not depend on it.
    """
    _check(num_samples, num_parts, part)
    if not 0 <= start <= num_samples:
        raise ConfigError(f"start={start} must be from 0 to num_samples={num_samples}")
    return range(start + (part - start) % num_parts, num_samples, num_parts)


def weighted(num_samples: int, weights: Sequence[float], part: int) -> range:
    """Contiguous parts; sizes are proportional to the weights, as in `quotas`."""
    _check(num_samples, len(weights), part)
    sizes = quotas(num_samples, weights)
    start = sum(sizes[:part])
    return range(start, start + sizes[part])


def quotas(num_samples: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the weights, each rounded up or down, that sum exactly.

    What rounding down leaves goes to the largest fractions; equal ones in order. A part with a
    weight above 0 has at least one sample as long as there are enough for all.
    """
    finite = [weight for weight in weights if isfinite(weight) and weight >= 0]
    if num_samples < 0 or len(finite) < len(weights) or not any(finite):
        raise ConfigError(
            f"num_samples={num_samples} and weights={list(weights)} must not be negative, weights "
            "must be finite, and one weight must be above 0"
        )
    exact = [Fraction(weight) for weight in weights]
    shares = [num_samples * weight / sum(exact) for weight in exact]
    sizes = [int(share) for share in shares]
    by_fraction = sorted(range(len(sizes)), key=lambda i: (sizes[i] - shares[i], i))
    for i in by_fraction[: num_samples - sum(sizes)]:
        sizes[i] += 1
    wanting = [i for i, weight in enumerate(exact) if weight > 0 and sizes[i] == 0]
    for i in wanting:
        richest = max(range(len(sizes)), key=lambda j: (sizes[j], -j))
        if sizes[richest] > 1:
            sizes[richest] -= 1
            sizes[i] = 1
    return sizes


def stratified(labels: npt.ArrayLike, num_parts: int, part: int) -> npt.NDArray[np.int64]:
    """Every label dealt out evenly: its counts, and the sizes, differ by at most one.

    Args:
        labels: One per sample: whole numbers, strings, anything that numpy can sort.
        num_parts: How many share the samples.
        part: Which part.

    Returns:
        The part's samples in the order of the data.
    """
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ConfigError(f"labels have shape {array.shape}; give one label per sample")
    mine = cyclic(len(array), num_parts, part)
    by_label = np.argsort(array, kind="stable")
    return np.sort(by_label[mine.start : mine.stop : mine.step]).astype(np.int64, copy=False)


def split(num_samples: int, sizes: Mapping[str, float]) -> dict[str, range]:
    """Cut into named ranges that never overlap, such as train, validation and test.

    Args:
        num_samples: How many there are.
        sizes: By name, in order: counts (whole numbers; the remainder belongs to no part) or
            fractions (floats; if they sum to 1, every sample belongs to a part).

    Returns:
        By name, positions from 0 on.
    """
    counts = all(isinstance(size, int) for size in sizes.values())
    total = sum(Fraction(size) if counts else _decimal(size) for size in sizes.values())
    room = num_samples if counts else 1
    if not sizes or min(sizes.values()) < 0 or total > room or (not counts and total == 0):
        raise ConfigError(
            f"sizes={dict(sizes)} do not fit into num_samples={num_samples}; give counts that sum "
            "to at most that, or fractions that sum to at most 1"
        )
    ends = [0]
    reached = Fraction(0)
    for size in sizes.values():
        reached += Fraction(size) if counts else _decimal(size) * num_samples
        ends.append(round(reached))
    return {name: range(*ends[i : i + 2]) for i, name in enumerate(sizes)}


def _decimal(number: float) -> Fraction:
    """What a person means by 0.1: a tenth, not the nearest double."""
    return Fraction(str(number))


def _check(num_samples: int, num_parts: int, part: int) -> None:
    if num_samples < 0 or num_parts < 1 or not 0 <= part < num_parts:
        raise ConfigError(
            f"part={part} of num_parts={num_parts} over num_samples={num_samples}: there must be "
            "at least one part, parts count from 0, and the number of samples is not negative"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Neighbouring rows of one file."""

    file: int
    start: int
    stop: int


def file_spans(sizes: Sequence[int], num_parts: int, part: int) -> list[Span]:
    """The rows of a part: sizes differ by at most one, and adjacent parts may share a file.

    Args:
        sizes: Rows in each file.
        num_parts: How many share them.
        part: Which part.
    """
    _check_sizes(sizes)
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
    """The files of a part, none of them shared: largest first, each to the part with the least.

    The parts differ by no more rows than the largest file has.
    """
    _check_sizes(sizes)
    block(0, num_parts, part)  # the same rules for parts
    return largest_first(sizes, num_parts)[part]


def _check_sizes(sizes: Sequence[int]) -> None:
    if any(size < 0 for size in sizes):
        raise ConfigError(f"sizes={list(sizes)} must not be negative")


_weighted = lru_cache(maxsize=256)(weighted)  # batches have few sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """The rule by which an epoch is cut."""

    global_batch: int
    drop_last: bool = False
    """Leave out a last batch that is not full."""
    even_last: bool = True
    """Make the last two batches equal where the last would be less than half full."""

    def __post_init__(self) -> None:
        """Refuse invalid batches."""
        if self.global_batch < 1:
            raise ConfigError(f"global_batch={self.global_batch} must be at least 1")

    @property
    def lookahead(self) -> int:
        """With this many samples ahead the next batch is a full one, whatever follows."""
        return self.global_batch + (self.global_batch + 1) // 2

    def next_size(self, remaining: int) -> int:
        """The size of the next batch when this many samples are left; 0 ends the epoch."""
        full = self.global_batch
        if remaining < full:
            return 0 if self.drop_last else remaining
        over = remaining - full
        if self.even_last and not self.drop_last and 0 < 2 * over < full:
            return (remaining + 1) // 2
        return full

    def count(self, remaining: int) -> int:
        """How many batches are left."""
        full, over = divmod(remaining, self.global_batch)
        return full if self.drop_last or over == 0 else full + 1

    def cut(self, start: int, num_samples: int) -> Iterator[range]:
        """The positions of each batch from `start` on."""
        while size := self.next_size(num_samples - start):
            yield range(start, start + size)
            start += size


def part_of(
    batch: range, num_ranks: int, rank: int, weights: Sequence[float] | None = None
) -> range:
    """The positions of a rank in a global batch.

    Dealt cyclically by position, which is also how shares are scattered; with weights, neighbours
    in proportion. A batch with fewer samples than ranks leaves some with none.
    """
    if weights is None:
        return cyclic(batch.stop, num_ranks, rank, start=batch.start)
    mine = _weighted(len(batch), tuple(weights), rank)
    return range(batch.start + mine.start, batch.start + mine.stop)


_CHUNK = 8192
"""Indices that are computed together: few numpy calls, and all data stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """One rank's place: its number, the number of ranks, and their weights."""

    rank: int
    num_ranks: int
    weights: tuple[float, ...] | None = None
    """Each rank's share of a batch; None divides it evenly."""

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
        seat: The rank and its weight.
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
