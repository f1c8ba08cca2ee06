"""From a source to batches, one feed for each kind of source."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from hpctrain.data.arrays import ArraySource
from hpctrain.data.batches import Batching
from hpctrain.data.mapped import MapSource
from hpctrain.data.plan import Part, Seat, plan_parts
from hpctrain.data.shuffle import Order
from hpctrain.data.source import Batch, Indices, Scattered, Source
from hpctrain.data.stream import Stream
from hpctrain.data.structure import as_tensor, map_leaves
from hpctrain.data.workers import WorkerOptions, Workers
from hpctrain.world.seeding import derive_seed

__all__ = ["Feed", "MapFeed", "ScatteredFeed", "SourceFeed", "StreamFeed", "Where", "order_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where in a run a feed begins."""

    seed: int
    epoch: int
    start: int
    """Samples of the epoch that are consumed already, over all ranks."""


class Feed(Protocol):
    """What a loader reads batches from."""

    num_samples: int | None
    """Over all ranks; None where nobody knows."""

    def prepare(self, where: Where) -> None:
        """Collective: before an epoch is read."""

    def read(self, where: Where) -> Iterator[tuple[Part, Batch]]:
        """This rank's part of every batch that is left of an epoch."""

    def close(self) -> None:
        """Let processes go."""


class _Quiet:
    """Nothing to prepare, nothing to close."""

    def prepare(self, where: Where) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class SourceFeed(_Quiet):
    """Random access: one gather of rows per batch."""

    def __init__(self, source: Source, kind: Any, batching: Batching, seat: Seat) -> None:
        self.num_samples: int | None = len(source)
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
            self._batching, self._seat, order.at, start=where.start, num_samples=len(self._source)
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

    def prepare(self, where: Where) -> None:
        """Collective: exchange samples until the shares follow the epoch's order."""
        if self._kind != "local":
            order = order_of(self._kind, len(self._source), where)
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
        self, source: MapSource, kind: Any, batching: Batching, seat: Seat, options: WorkerOptions
    ) -> None:
        self.num_samples: int | None = len(source)
        self._source = source
        self._kind = kind
        self._batching = batching
        self._seat = seat
        self._options = options
        self._workers: Workers | None = None

    def read(self, where: Where) -> Iterator[tuple[Part, Batch]]:
        """Batches in the epoch's global order."""
        seed = derive_seed(where.seed, "sample", where.epoch)
        order = order_of(self._kind, len(self._source), where)
        parts = plan_parts(
            self._batching, self._seat, order.at, start=where.start, num_samples=len(self._source)
        )
        if self._options.num_workers == 0:
            for part, indices in parts:
                yield part, self._source.fetch(indices, seed)
            return
        if self._workers is None:
            own = derive_seed(where.seed, "workers", self._seat.rank)
            self._workers = Workers(self._source, self._options, own)
        asked: deque[Part] = deque()  # jobs are drawn ahead of the batches that they give

        def jobs() -> Iterator[tuple[Indices, int]]:
            for part, indices in parts:
                asked.append(part)
                yield indices, seed

        for batch in self._workers.fetch(jobs()):
            yield asked.popleft(), batch

    def close(self) -> None:
        """End the workers."""
        self._workers = None


class StreamFeed(_Quiet):
    """A stream, read here or in one worker process."""

    def __init__(
        self, stream: Stream, batching: Batching, seat: Seat, options: WorkerOptions
    ) -> None:
        self.num_samples: int | None = None
        self._stream = stream
        self._batching = batching
        self._seat = seat
        self._options = options

    def read(self, where: Where) -> Iterator[tuple[Part, Batch]]:
        """Batches in the stream's own order."""
        batches = _StreamBatches(self._stream, self._batching, self._seat, where)
        if self._options.num_workers == 0:
            yield from batches
        else:
            own = derive_seed(where.seed, "workers", self._seat.rank)
            yield from Workers(batches, self._options, own).fetch()


class _StreamBatches(IterableDataset[tuple[Part, Batch]]):
    """The batches of a stream; travels to a worker."""

    def __init__(self, stream: Stream, batching: Batching, seat: Seat, where: Where) -> None:
        self._stream, self._batching, self._seat, self._where = stream, batching, seat, where

    def __iter__(self) -> Iterator[tuple[Part, Batch]]:
        where = self._where
        return self._stream.read(
            self._batching, self._seat, start=where.start, seed=where.seed, epoch=where.epoch
        )


def order_of(kind: Any, num_samples: int, where: Where) -> Order:
    """The global order of an epoch."""
    return Order(kind=kind, num_samples=num_samples, seed=where.seed, epoch=where.epoch)
