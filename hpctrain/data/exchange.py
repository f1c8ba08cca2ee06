"""Rows from every rank to every rank: who has a row says where it goes.

The ranks exchange in pairs, each with its next peer first, so that every rank sends and receives
all the time. Rows go in chunks, in messages that 31 bits can count, and straight to their places.
`reorder` gives scattered shares a new order this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpctrain.data.adopting import SourceRows
from hpctrain.data.alike import require_alike
from hpctrain.data.shuffle import Order
from hpctrain.data.table import (
    MESSAGE_BYTES,
    Arrivals,
    Form,
    Table,
    share_length,
    split_bytes,
    split_rows,
)
from hpctrain.errors import ConfigError
from hpctrain.world import World, finish, takes_timeout

if TYPE_CHECKING:
    from mpi4py.MPI import Request

__all__ = ["CHUNK_BYTES", "Route", "exchange", "reorder"]


_TAG = 7431
_HEADER = np.dtype(np.int64)


class Route:
    """Where the rows of one rank go.

    Args:
        rows: Which rows of the table, in any order, some of them perhaps several times.
        ranks: The rank that each goes to.
        places: The row that it becomes there.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.int64],
        ranks: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> None:
        by_rank = np.argsort(ranks, kind="stable")
        self.rows = rows[by_rank]
        self.places = places[by_rank]
        self._ranks = ranks[by_rank]

    def to(self, rank: int) -> slice:
        """The part of `rows` and `places` that goes to a rank."""
        start, stop = np.searchsorted(self._ranks, [rank, rank + 1])
        return slice(int(start), int(stop))


def exchange(
    world: World,
    table: Table | SourceRows | None,
    route: Route,
    num_rows: int,
    *,
    form: Form,
    chunk_bytes: int,
    message_bytes: int = MESSAGE_BYTES,
    timeout_s: float,
) -> Any:
    """Collective: send rows where they belong; the form, chunk and message sizes must match.

    Args:
        world: The ranks.
        table: This rank's rows; None where it has none.
        route: Where they go.
        num_rows: How many rows come here; every place is filled once.
        form: What the rows are made of.
        chunk_bytes: Memory for the rows on their way, half of it for either direction.
        message_bytes: The most bytes in one message.
        timeout_s: How long to wait for a rank that is stuck.

    Returns:
        The received rows, in the form of the data set.
    """
    shapes: np.ndarray | None = None
    limits: dict[str, Any] = {
        "chunk_bytes": chunk_bytes,
        "message_bytes": message_bytes,
        "timeout_s": timeout_s,
    }
    if form.varies:
        own = None if table is None or table.shapes is None else Table(table.shapes)
        shapes = exchange(world, own, route, num_rows, form=form.of_shapes(), **limits)
    room = Arrivals(form, num_rows, shapes)
    for step in range(world.size):
        _Pair(world, table, route, room, step, **limits).run()
    return room.finish()


class _Pair:
    """One step: rows go to the rank `step` ahead and come from the one `step` behind."""

    def __init__(
        self,
        world: World,
        table: Table | SourceRows | None,
        route: Route,
        room: Arrivals,
        step: int,
        *,
        chunk_bytes: int,
        message_bytes: int,
        timeout_s: float,
    ) -> None:
        self._comm = world.comm
        self._target = (world.rank + step) % world.size
        self._source = (world.rank - step) % world.size
        self._table = table
        self._room = room
        part = route.to(self._target)
        self._rows, self._places = route.rows[part], route.places[part]
        self._limit = max(1, chunk_bytes // 2)
        self._message_bytes = message_bytes
        self._timeout_s = timeout_s

    def run(self) -> None:
        """Collective: exchange everything of this step."""
        if self._target == self._source and self._target == self._comm.Get_rank():
            for data, num in self._packed():
                self._unpack(data, num)
            return
        packed = self._packed()
        sending = receiving = True
        while sending or receiving:
            sent: list[Request] = []
            kept: list[np.ndarray] = []
            if sending:
                data, num = next(packed, (np.empty(0, np.uint8), 0))
                sending = num > 0
                kept = [np.array([num, len(data)], _HEADER), data]
                sent = self._send(kept)
            if receiving:
                receiving = self._receive()
            finish(sent, f"rank {self._target} to take its rows", timeout_s=self._timeout_s)

    def _packed(self) -> Iterator[tuple[np.ndarray, int]]:
        """Chunks of rows: their places, then their bytes."""
        if self._table is None:
            return
        sizes = self._table.sizes
        if not isinstance(sizes, int):
            sizes = sizes[self._rows]
        for start, stop in split_rows(sizes + 8, len(self._rows), self._limit):
            num_rows = stop - start
            num_bytes = sizes * num_rows if isinstance(sizes, int) else sizes[start:stop].sum()
            data = np.empty(8 * num_rows + int(num_bytes), np.uint8)
            data[: 8 * num_rows].view(np.int64)[...] = self._places[start:stop]
            self._table.read(self._rows[start:stop], data[8 * num_rows :])
            yield data, num_rows

    def _unpack(self, data: np.ndarray, num_rows: int) -> None:
        places = data[: 8 * num_rows].view(np.int64)
        self._room.write(places, data[8 * num_rows :])

    def _send(self, parts: list[np.ndarray]) -> list[Request]:
        header, data = parts
        requests = [self._comm.Isend(header, dest=self._target, tag=_TAG)]
        for start, stop in split_bytes(len(data), self._message_bytes):
            requests.append(self._comm.Isend(data[start:stop], dest=self._target, tag=_TAG))
        return requests

    def _receive(self) -> bool:
        """Take one chunk; False when there is none left."""
        header = np.empty(2, _HEADER)
        self._take(header)
        num_rows, num_bytes = (int(number) for number in header)
        if num_rows == 0:
            return False
        data = np.empty(num_bytes, np.uint8)
        for start, stop in split_bytes(num_bytes, self._message_bytes):
            self._take(data[start:stop])
        self._unpack(data, num_rows)
        return True

    def _take(self, out: np.ndarray) -> None:
        request = self._comm.Irecv(out, source=self._source, tag=_TAG)
        finish([request], f"rank {self._source} to send rows", timeout_s=self._timeout_s)


CHUNK_BYTES = 16 << 20

_Rows = npt.NDArray[np.int64]


@takes_timeout
def reorder(
    world: World,
    table: Table | SourceRows,
    old: Order,
    new: Order,
    *,
    locate: Callable[[_Rows], _Rows],
    chunk_bytes: int = CHUNK_BYTES,
    timeout_s: float | None = None,
) -> Table:
    """Collective: exchange rows so that shares which follow `old` follow `new`, which must match.

    An order says which sample is at a position, not where a sample is. So a third rank, given by
    the sample's number, learns for each sample who has it and who needs it, and tells the one who
    has it. No rank needs memory for more than its share of the samples.

    Args:
        world: The ranks.
        table: Where this rank's rows are.
        old: What the shares follow.
        new: What they shall follow.
        locate: Which rows of the table this rank's share consists of.
        chunk_bytes: Memory for the rows on their way.
        timeout_s: How long to wait for a rank that is missing or stuck.
            None: as long as the world waits for any rank.

    Raises:
        ConfigError: on all ranks, when the orders are of different numbers of samples.
    """
    timeout_s = world.watching.limit_s(timeout_s)
    require_alike(world, "reorder", {"order": new, "chunk_bytes": chunk_bytes}, timeout_s=timeout_s)
    total, rank, size = old.num_samples, world.rank, world.size
    if new.num_samples != total:
        raise ConfigError(
            f"reorder: the order has {new.num_samples} samples and the shares have {total}; the "
            "two must match"
        )

    def move(rows: Table | SourceRows, route: Route) -> Any:
        return exchange(
            world,
            rows,
            route,
            count,
            form=rows.form,
            chunk_bytes=chunk_bytes,
            timeout_s=timeout_s,
        )

    def tell(values: np.ndarray, ranks: _Rows, places: _Rows) -> np.ndarray:
        route = Route(np.arange(len(values)), ranks, places)
        told: np.ndarray = move(Table(values), route)
        return told

    count = share_length(total, rank, size)
    here = np.stack([np.full(count, rank), np.arange(count)], axis=1)
    has = old.between(rank, total, size)
    wants = new.between(rank, total, size)
    holders = tell(here, has % size, has // size)
    takers = tell(here, wants % size, wants // size)
    targets = tell(takers, holders[:, 0].copy(), holders[:, 1].copy())
    del here, has, wants, holders, takers
    route = Route(locate(np.arange(count)), targets[:, 0].copy(), targets[:, 1].copy())
    return Table(move(table, route))
