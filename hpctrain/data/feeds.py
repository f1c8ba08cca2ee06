"""From a source to batches, one feed for each kind of source."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from torch.utils.data import IterableDataset

from hpctrain.data.alike import (
    ReadReport,
    require_fitting_streams,
    require_same_reading,
    sum_of_readings,
)
from hpctrain.data.mapped import MapSource, no_rows
from hpctrain.data.partition import Batching, Indices, Part, Seat, plan_parts
from hpctrain.data.shuffle import Draw, EpochPlan, Order
from hpctrain.data.source import ArraySource, Batch, Scattered, Source, as_tensor, map_leaves
from hpctrain.data.stream import Opening, Split, Stream, StreamReading
from hpctrain.data.workers import Job, WorkerOptions, Workers
from hpctrain.errors import ConfigError, HpcTrainError
from hpctrain.world import derive_seed

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["Feed", "MapFeed", "ScatteredFeed", "SourceFeed", "StreamFeed", "Where", "order_of"]

T = TypeVar("T")

_TIMEOUT_S = 300.0
"""How long ranks wait for one whose stream does not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where in a run a feed begins."""

    seed: int
    epoch: int
    start: int
    """Samples of the epoch already consumed, over all ranks."""


class Feed(Protocol):
    """What a loader reads batches from."""

    num_samples: int | None
    """Over all ranks; None if unknown."""

    def prepare(self, where: Where, comm: Comm) -> None:
        """Collective: before an epoch is read."""

    def read(self, where: Where) -> Iterator[tuple[Part, Batch]]:
        """This rank's part of every batch that is left of an epoch."""

    def close(self) -> None:
        """Let processes go."""


class _Quiet:
    """Nothing to prepare, nothing to close."""

    def prepare(self, where: Where, comm: Comm) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class SourceFeed(_Quiet):
    """Random access: one gather of rows per batch."""

    def __init__(self, source: Source, kind: str | Draw, batching: Batching, seat: Seat) -> None:
        self._num = len(source) if isinstance(kind, str) else kind.num_drawn
        self.num_samples: int | None = self._num
        self._source = source
        self._kind = kind
        self._batching = batching
        self._seat = seat

    def read(self, where: Where) -> Iterator[tuple[Part, Batch]]:
        """Batches in the epoch's global order."""
        order = order_of(self._kind, len(self._source), where)
        take = self._source.take
        raw = isinstance(self._source, ArraySource)
        for part, indices in plan_parts(
            self._batching, self._seat, order.at, start=where.start, num_samples=self._num
        ):
            batch = take(indices)
            yield part, batch if raw else map_leaves(as_tensor, batch)


class ScatteredFeed(_Quiet):
    """Every rank reads its own share, in the share's order."""

    def __init__(self, source: Scattered, kind: Any, batching: Batching, seat: Seat) -> None:
        self.num_samples: int | None = len(source)
        self._source = source
        self._kind = kind
        self._batching = batching
        self._seat = seat

    def prepare(self, where: Where, comm: Comm) -> None:
        """Collective: exchange samples until the shares follow the epoch's order."""
        if self._kind != "local":
            order = shuffle_of(self._kind, len(self._source), where)
            if not order.equals(self._source.order):
                self._source.reorder(order)

    def read(self, where: Where) -> Iterator[tuple[Part, Batch]]:
        """This rank's rows, in order or shuffled among themselves."""
        rank, num_ranks = self._seat.rank, self._seat.num_ranks
        local: Order | None = None
        if self._kind == "local":
            own = derive_seed(where.seed, "local", rank)
            num_rows = len(range(rank, len(self._source), num_ranks))
            local = Order(kind="numpy", num_samples=num_rows, seed=own, epoch=where.epoch)

        def look_up(positions: Indices) -> Indices:
            rows = positions // num_ranks
            return rows if local is None else local.at(rows)

        for part, rows in plan_parts(
            self._batching, self._seat, look_up, start=where.start, num_samples=len(self._source)
        ):
            yield part, map_leaves(as_tensor, self._source.take(rows))


class MapFeed(_Quiet):
    """Sample by sample, here or in worker processes."""

    def __init__(
        self,
        source: MapSource,
        kind: str | Draw,
        batching: Batching,
        seat: Seat,
        options: WorkerOptions,
    ) -> None:
        self._num = len(source) if isinstance(kind, str) else kind.num_drawn
        self.num_samples: int | None = self._num
        self._source = source
        self._kind = kind
        self._batching = batching
        self._seat = seat
        self._options = options
        self._workers: Workers | None = None

    def read(self, where: Where) -> Iterator[tuple[Part, Batch]]:
        """Batches in the epoch's global order."""
        if self._options.num_workers == 0:
            for part, job in self._jobs(where):
                yield part, self._source.fetch(*job)
            return
        if self._workers is None:
            own = derive_seed(where.seed, "workers", self._seat.rank)
            self._workers = Workers(self._source, self._options, own)
        asked: deque[Part] = deque()  # jobs are drawn ahead of the batches that they give

        def jobs() -> Iterator[Job]:
            for part, job in self._jobs(where):
                asked.append(part)
                yield job

        for batch in self._workers.fetch(jobs()):
            yield asked.popleft(), batch

    def _jobs(self, where: Where) -> Iterator[tuple[Part, Job]]:
        """What is to be fetched; a sample that comes twice has new random numbers each time."""
        seed = derive_seed(where.seed, "sample", where.epoch)
        order = order_of(self._kind, len(self._source), where)
        repeats = not isinstance(self._kind, str) and self._kind.repeats
        for part, found in plan_parts(
            self._batching,
            self._seat,
            _as_they_are if repeats else order.at,
            start=where.start,
            num_samples=self._num,
        ):
            yield part, (order.at(found), seed, found) if repeats else (found, seed, None)

    def close(self) -> None:
        """End the workers."""
        self._workers = None


def _as_they_are(positions: Indices) -> Indices:
    return positions


class StreamFeed:
    """A stream, read here or in one worker process."""

    def __init__(
        self,
        stream: Stream,
        batching: Batching,
        seat: Seat,
        options: WorkerOptions,
        split: Split = None,
    ) -> None:
        self.num_samples: int | None = None
        self._stream = stream
        self._batching = batching
        self._seat = seat
        self._options = options
        self._split = split
        self._begun: Iterator[tuple[Part, Batch]] | None = None

    def prepare(self, where: Where, comm: Comm) -> None:
        """Collective: begin the stream, and see that the streams of all ranks go together."""
        source = _StreamBatches(self._stream, self._batching, self._seat, where, self._split)
        if self._options.num_workers:
            own = derive_seed(where.seed, "workers", self._seat.rank)
            items: Iterator[Any] = Workers(source, self._options, own).fetch()
        else:
            items = iter(source)
        opening, failure = None, None
        try:
            opening = cast(Opening, next(items))
        except Exception as error:  # the user's stream may raise anything, and the others wait
            failure = error
        told = _tell(failure)
        try:
            if self._seat.num_ranks > 1:
                require_fitting_streams(comm, opening, told, self._split, timeout_s=_TIMEOUT_S)
        except HpcTrainError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        if self._split == "already":
            self._begun = self._together(items, where, comm)
        else:
            self._begun = self._compared(items, comm)

    def read(self, where: Where) -> Iterator[tuple[Part, Batch]]:
        """Batches in the stream's own order."""
        begun, self._begun = self._begun, None
        if begun is None:
            raise ConfigError("another loop over this stream has begun; one loop at a time")
        yield from begun

    def close(self) -> None:
        """Let a stream go that was begun and not read."""
        self._begun = None

    def _compared(self, items: Iterator[StreamReading], comm: Comm) -> Iterator[tuple[Part, Batch]]:
        """Collective: batches of one stream that every rank reads, as long as it is one.

        Streams with the same start may differ later, or in length. A rank that continued
        alone would wait for the others forever, so they compare before every batch.
        """
        num_read = 0
        while True:
            reading, failure = _next(items)
            if self._seat.num_ranks > 1:
                digests = b""
                if reading is not None:
                    num_read, digests = reading.num_read, reading.digests
                try:
                    require_same_reading(comm, ReadReport(num_read, digests, _tell(failure)))
                except HpcTrainError:
                    if failure is None:
                        raise
            if failure is not None:
                raise failure
            if reading is None or reading.part is None:
                return
            yield reading.part, reading.batch

    def _together(
        self, items: Iterator[tuple[Part, Batch]], where: Where, comm: Comm
    ) -> Iterator[tuple[Part, Batch]]:
        """Collective: batches of streams that are split already, until no rank has samples.

        Ranks whose streams have ended take part with empty batches. It is unknown how long the
        streams of others are, so each batch costs one message of 8 bytes.
        """
        stop, size = where.start, self._batching.global_batch
        template: Batch = None
        while True:
            item, failure = _next(items)
            part, batch = (None, None) if item is None else item
            count = 0 if part is None else part.num_samples
            try:
                total = sum_of_readings(comm, count, _tell(failure))
            except HpcTrainError:
                if failure is None:
                    raise
            if failure is not None:
                raise failure
            if total == 0 or (self._batching.drop_last and total < size):
                return
            stop += size
            template = template if batch is None else batch
            yield Part(stop, total, count), batch if count else map_leaves(no_rows, template)


def _next(items: Iterator[T]) -> tuple[T | None, Exception | None]:
    """What comes next, if anything does; and why it could not be read, for the others wait."""
    try:
        return next(items, None), None
    except Exception as error:  # the user's stream may raise anything
        return None, error


def _tell(failure: Exception | None) -> str:
    return "" if failure is None else f"{type(failure).__name__}: {failure}"


class _StreamBatches(IterableDataset[Any]):
    """How a stream begins, and its batches; sent to a worker."""

    def __init__(
        self, stream: Stream, batching: Batching, seat: Seat, where: Where, split: Split
    ) -> None:
        self._stream, self._batching, self._seat = stream, batching, seat
        self._where, self._split = where, split

    def __iter__(self) -> Iterator[Opening | StreamReading | tuple[Part, Batch]]:
        where = self._where
        return self._stream.read(
            self._batching,
            self._seat,
            start=where.start,
            seed=where.seed,
            epoch=where.epoch,
            split=self._split,
        )


def order_of(kind: Any, num_samples: int, where: Where) -> EpochPlan:
    """The global order of an epoch."""
    if not isinstance(kind, str):
        draw: Draw = kind
        return draw.plan(where.seed, where.epoch)
    return shuffle_of(kind, num_samples, where)


def shuffle_of(kind: Any, num_samples: int, where: Where) -> Order:
    """The order of an epoch that has every sample once."""
    return Order(kind=kind, num_samples=num_samples, seed=where.seed, epoch=where.epoch)
