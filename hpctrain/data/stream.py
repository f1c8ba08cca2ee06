"""`IterableDataset`: a stream that every rank reads, whole or its own part of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

from torch.utils.data import default_collate

from hpctrain.data.fingerprint import digest_sample, is_read, show_sample
from hpctrain.data.mapped import Collate, OwnGenerators, no_rows
from hpctrain.data.partition import Batching, Part, Seat, cyclic
from hpctrain.data.source import Batch, map_leaves
from hpctrain.errors import DataError
from hpctrain.world import derive_seed

__all__ = ["Opening", "Split", "Stream", "StreamReading"]

Split: TypeAlias = Literal["already", "same"] | None
"""`already`: every rank's stream is its own part. `same`: the streams are one, unchecked."""

_COMPARED = 16
"""Samples at the start of a stream that are compared between ranks."""

_MOST_BYTES = 1 << 16
"""Of one array of a sample; longer ones are compared in pieces, because every sample is
compared."""


class Opening(NamedTuple):
    """How a rank's stream begins."""

    digests: tuple[bytes, ...]
    """Of its first samples."""
    shown: str
    """The first one in words."""
    is_read: bool
    """Whether the digests cover content, rather than types alone."""


class StreamReading(NamedTuple):
    """What a rank read of a stream that all ranks read, for one batch."""

    part: Part | None
    """None: the epoch has ended."""
    batch: Batch
    num_read: int
    """Samples of the epoch so far."""
    digests: bytes
    """Of the samples since the reading before, one after the other; empty: not compared."""


class Stream:
    """A stream of samples, the same on every rank; position p belongs to rank `p % num_ranks`.

    Its random numbers start over with every epoch, in the same way on all ranks, so that a resumed
    run reads again what the stopped one has read. What collating draws is apart from them, for
    ranks collate different samples: it is keyed by the first one.
    """

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset = dataset
        self._collate: Collate = collate or default_collate

    def read(
        self,
        batching: Batching,
        seat: Seat,
        *,
        start: int,
        seed: int,
        epoch: int,
        split: Split = None,
    ) -> Iterator[Opening | StreamReading | tuple[Part, Batch]]:
        """How the stream begins; then every batch that is left of an epoch, as this rank sees it.

        Of a stream that all ranks read: readings, the last one without a batch.

        Args:
            batching: How the stream is cut.
            seat: The rank and its weight.
            start: Samples that are consumed already; they are read and passed over.
            seed: Of the run.
            epoch: Which epoch; `set_epoch` of the data set is called if it exists.
            split: With `already` the stream holds this rank's samples alone: its i-th one stands at
                position `i * num_ranks + rank`, and positions beyond its end are left out.
        """
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        own = OwnGenerators(derive_seed(seed, "stream", epoch))
        num_compared = min(batching.lookahead, _COMPARED)
        if split == "same" or seat.num_ranks == 1:
            num_compared = 0
        with own:
            samples = iter(self.dataset)
            first = deque(islice(samples, num_compared))
        yield Opening(
            digests=tuple(map(digest_sample, first)),
            shown=show_sample(first[0]) if first else "nothing",
            is_read=not first or any(map(is_read, first)),
        )
        samples = _chain(first, samples)
        collating = _Collating(self._collate, seed, epoch)
        if split == "already":
            yield from _own_batches(samples, own, collating, batching, seat, start)
        else:
            is_compared = num_compared > 0
            yield from _dealt_batches(samples, own, collating, batching, seat, start, is_compared)


class _Collating:
    """Makes batches, with random numbers that are keyed by the place of the first sample."""

    def __init__(self, collate: Collate, seed: int, epoch: int) -> None:
        self._collate, self._seed, self._epoch = collate, seed, epoch
        self._generators = OwnGenerators(seed)

    def __call__(self, samples: list[Any], place: int) -> Batch:
        with self._generators as generators:
            generators.seed(derive_seed(self._seed, "collate", self._epoch, place))
            return self._collate(samples)


def _chain(first: deque[Any], rest: Iterable[Any]) -> Iterator[Any]:
    """Samples that were already read, released one by one, and then the others."""
    while first:
        yield first.popleft()
    yield from rest


def _dealt_batches(
    samples: Iterator[Any],
    own: OwnGenerators,
    collate: _Collating,
    batching: Batching,
    seat: Seat,
    start: int,
    is_compared: bool,
) -> Iterator[StreamReading]:
    """This rank's part of one stream that all ranks read whole."""
    with own:
        num_read = sum(1 for _ in islice(samples, start))
    if num_read < start:
        raise DataError(
            f"the stream ended after {num_read} samples, and {start} are consumed already; "
            "resume with the stream that the run was stopped in"
        )
    ahead: deque[Any] = deque()  # this rank's samples that are read and not returned yet
    latest: Any = None
    while True:
        wanted = batching.lookahead - (num_read - start)
        digests = bytearray()
        with own:
            for sample in islice(samples, wanted):
                latest = sample
                if num_read % seat.num_ranks == seat.rank:
                    ahead.append(sample)
                num_read += 1
                if is_compared:
                    digests += digest_sample(sample, most_bytes=_MOST_BYTES)
        size = batching.next_size(num_read - start)
        if size == 0:
            yield StreamReading(None, None, num_read, bytes(digests))
            return
        places = seat.part_of(range(start, start + size))
        count = len(places)
        mine = [ahead.popleft() for _ in range(count)]
        batch = collate(mine or [latest], places[0] if count else start)
        start += size
        if not mine:
            batch = map_leaves(no_rows, batch)
        yield StreamReading(Part(start, size, count), batch, num_read, bytes(digests))


def _own_batches(
    samples: Iterator[Any],
    own: OwnGenerators,
    collate: _Collating,
    batching: Batching,
    seat: Seat,
    start: int,
) -> Iterator[tuple[Part, Batch]]:
    """All that this rank's stream still has; the others' are unknown here.

    `Part.global_samples` is what a full batch has. A stream that has nothing left gives one sample
    of it, which counts as none: a batch to be cut to no rows.
    """
    latest: Any = None
    with own:
        for sample in islice(samples, len(cyclic(start, seat.num_ranks, seat.rank))):
            latest = sample
    size = batching.global_batch
    begun = False
    while True:
        places = seat.part_of(range(start, start + size))
        with own:
            mine = list(islice(samples, len(places)))
        start += size
        if mine:
            yield Part(start, size, len(mine)), collate(mine, places[0])
            begun = True
        elif latest is not None and not begun:
            yield Part(start, size, 0), collate([latest], places[0])
            return
        else:
            return
