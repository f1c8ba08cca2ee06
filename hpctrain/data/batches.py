"""How an epoch is cut into global batches, and who has which positions of one. Pure.

Where a batch ends depends on how many samples are left and on nothing else: not on the ranks, nor
on where a resumed run began. So the same batches come out of every number of ranks, and after every
stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpctrain.data.partition import cyclic, weighted
from hpctrain.errors import ConfigError

__all__ = ["Batching", "part_of"]

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
        """Refuse what is no batch."""
        if self.global_batch < 1:
            raise ConfigError(f"global_batch={self.global_batch} must be at least 1")

    @property
    def lookahead(self) -> int:
        """With so many samples ahead the next batch is a full one, whatever follows."""
        return self.global_batch + (self.global_batch + 1) // 2

    def next_size(self, remaining: int) -> int:
        """The size of the next batch when so many samples are left; 0 ends the epoch."""
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
