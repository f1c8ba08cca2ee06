"""`scatter`: the root's data set to all ranks, each its share (a `Shard`) and nothing else.

`reshuffle` exchanges samples between the shares for another epoch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain import log
from hpctrain.data.adopting import SourceRows, rows_of
from hpctrain.data.alike import require_alike
from hpctrain.data.channel import Channel, Inlet, Outlet, open_channel
from hpctrain.data.exchange import reorder
from hpctrain.data.shuffle import Order, choose_kind
from hpctrain.data.table import (
    MESSAGE_BYTES,
    Arrivals,
    Form,
    Table,
    check_chunk,
    share_length,
    split_rows,
)
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.world import World, agree, takes_timeout

__all__ = ["CHUNK_BYTES", "Shard", "reshuffle", "scatter"]


class Shard:
    """This rank's rows: row i of rank r is position `i * size + r` of the order.

    Made by `scatter`. A `Scattered` source for a loader.

    Args:
        world: The ranks.
        order: What the shares of all ranks follow.
        table: This rank's rows, or the whole data set where this rank has it.
        whole: Whether it is the whole data set, of which only this rank's rows are read.
    """

    def __init__(
        self, world: World, order: Order, table: Table | SourceRows, *, whole: bool = False
    ) -> None:
        self._world = world
        self._order = order
        self._table = table
        self._whole = whole

    @property
    def order(self) -> Order:
        """What the shares follow now; the same on every rank."""
        return self._order

    @property
    def num_rows(self) -> int:
        """How many samples this rank has."""
        return share_length(len(self), self._world.rank, self._world.size)

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """The number in the data set of each of this rank's samples."""
        return self._order.between(self._world.rank, len(self), self._world.size)

    @property
    def data(self) -> Any:
        """This rank's samples, in the form that the data set was given in.

        A rank that holds the whole data set copies its share out, and again at each call.
        """
        if self._whole or not isinstance(self._table, Table):
            return self.take(np.arange(self.num_rows))
        return self._table.form.outline.build(self._table.values)

    def __len__(self) -> int:
        """How many samples there are over all ranks."""
        return self._order.num_samples

    def take(self, rows: npt.NDArray[np.int64]) -> Any:
        """These rows of this rank's share, copied, in the form of the data set."""
        rows = np.asarray(rows, np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise ConfigError(
                f"rows from {rows.min()} to {rows.max()} are not all from 0 to "
                f"{self.num_rows - 1}, which this rank has"
            )
        return self._table.take(self._locate(rows))

    def reorder(self, order: Order) -> None:
        """Collective: exchange samples until the shares follow `order`, which must match.

        Raises:
            ConfigError: on all ranks, when the order is of another number of samples, or differs.
        """
        self._table = reorder(self._world, self._table, self._order, order, locate=self._locate)
        self._order = order
        self._whole = False

    def _locate(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where these rows of the share are in the table."""
        if not self._whole:
            return rows
        return self._order.at(rows * self._world.size + self._world.rank)


def reshuffle(world: World, shard: Shard, *, epoch: int | None = None) -> Shard:
    """Collective: exchange samples between ranks so that the shares follow another epoch's order.

    Memory: the old share, the new one and one chunk.

    Args:
        world: The ranks that the data were scattered to.
        shard: What `scatter` gave; it is changed in place.
        epoch: Whose order to follow, the same on all ranks; None takes the next.

    Returns:
        The same shard.

    Raises:
        ConfigError: on all ranks, when the data were scattered in their own order, or `epoch` is
            negative.
    """
    trouble = None
    if shard.order.kind == "stored":
        trouble = "the data were scattered with shuffle=False, so every epoch has the same order"
    elif epoch is not None and epoch < 0:
        trouble = f"epoch={epoch} must not be negative"
    agree(world.comm, trouble and f"reshuffle: {trouble}", error=ConfigError)
    shard.reorder(shard.order.of_epoch(shard.order.epoch + 1 if epoch is None else epoch))
    return shard


CHUNK_BYTES = 8 << 20
"""Extra memory while the data are moved."""

_MANY_PICKLED_BYTES = 64 << 20


@takes_timeout
def scatter(
    world: World,
    data: Any,
    *,
    root: int = 0,
    shuffle: bool = True,
    seed: int | None = None,
    epoch: int = 0,
    keep_whole: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    message_bytes: int = MESSAGE_BYTES,
    timeout_s: float | None = None,
) -> Shard:
    """Collective: give every rank its share of the root's data set; all but `data` must match.

    Position k of the epoch's order goes to rank k mod size, so that "k samples consumed" means the
    same on every number of ranks. Memory: on the root the data set and one chunk, elsewhere the
    share and one chunk (a chunk holds at least two samples).

    Args:
        world: The ranks.
        data: On the root: an array, a tensor, a list of samples, a dict or tuple of these, a
            source, or a data set with `__len__` and `__getitem__`. None on all other ranks.
        root: Who has the data.
        shuffle: Follow the epoch's order; False follows the order of the data.
        seed: Of the order; None takes the world's.
        epoch: Whose order.
        keep_whole: The root's share refers to its data set (do not write to it then); False copies
            the share, so that the data set can be freed.
        chunk_bytes: How much is sent at a time.
        message_bytes: The most bytes in one message.
        timeout_s: How long to wait for a rank that is missing or stuck.
            None: as long as the world waits for any rank.

    Raises:
        ConfigError: on all ranks, when the data or the arguments are wrong.
        CollectiveError: a rank did not arrive, or the root could not read a sample.
    """
    timeout_s = world.watching.limit_s(timeout_s)
    settings = {"root": root, "shuffle": shuffle, "seed": seed, "epoch": epoch}
    settings |= {"chunk_bytes": chunk_bytes, "message_bytes": message_bytes}
    require_alike(world, "scatter", settings, timeout_s=timeout_s)
    chosen = world.seed if seed is None else seed
    table, trouble = _examine(world, data, root, chosen, epoch, chunk_bytes, message_bytes)
    agree(world.comm, trouble, error=ConfigError, timeout_s=timeout_s)
    form, total, largest, total_bytes = world.comm.bcast(_plan(table), root=root)
    order = Order(
        kind=choose_kind(total) if shuffle else "stored",
        num_samples=total,
        seed=chosen,
        epoch=epoch,
    )
    channel = open_channel(
        world,
        root,
        chunk_bytes=chunk_bytes,
        row_bytes=largest,
        total_bytes=total_bytes,
        message_bytes=message_bytes,
        timeout_s=timeout_s,
    )
    failure: Exception | None = None
    received: Any = None
    try:
        if table is not None:
            failure = _send_all(world, channel, table, order)
        else:
            received = _receive_all(world, channel, form, total)
    finally:
        channel.close()
    _agree_on(world, failure, timeout_s)
    if table is None:
        return Shard(world, order, Table(received))
    shard = Shard(world, order, table, whole=True)
    return shard if keep_whole else Shard(world, order, Table(shard.data))


def _agree_on(world: World, failure: Exception | None, timeout_s: float) -> None:
    """Collective: all ranks have their rows, or none has."""
    trouble = None if failure is None else f"scatter: the data set cannot be read: {failure}"
    try:
        agree(world.comm, trouble, timeout_s=timeout_s)
    except CollectiveError as told:
        raise told from failure


def _examine(
    world: World,
    data: Any,
    root: int,
    seed: int,
    epoch: int,
    chunk_bytes: int,
    message_bytes: int,
) -> tuple[Table | SourceRows | None, str | None]:
    """Check this rank's arguments: the root's table, or what is wrong."""
    if not 0 <= root < world.size:
        return None, f"scatter: root={root} is not a rank; choose 0 <= root < {world.size}"
    trouble = check_chunk(chunk_bytes)
    if trouble is None and not 1 <= message_bytes <= MESSAGE_BYTES:
        trouble = f"message_bytes={message_bytes} must be from 1 to {MESSAGE_BYTES}"
    if trouble is None and epoch < 0:
        trouble = f"epoch={epoch} must not be negative"
    if trouble is not None:
        return None, f"scatter: {trouble}"
    if world.rank != root:
        return None, None if data is None else (
            f"scatter: data were given here as well, although only root={root} sends any; pass "
            "None on the other ranks (for data that every rank can read, use share or files)"
        )
    if data is None:
        return None, f"scatter: data is None on root={root}; the root must pass the data set"
    try:
        table = rows_of(data, seed)
    except ConfigError as error:
        return None, f"scatter: {error}"
    except Exception as error:  # a data set may raise anything, and the other ranks wait
        return None, f"scatter: the data set cannot be read: {type(error).__name__}: {error}"
    pickled = table.num_pickled_bytes
    if pickled > _MANY_PICKLED_BYTES:
        log.warn(
            f"scatter: {log.format_bytes(pickled)} of Python objects are sent as pickles, which "
            "is slow and takes memory; use arrays or tensors"
        )
    return table, None


def _plan(table: Table | SourceRows | None) -> tuple[Form, int, int, int] | None:
    """What all ranks must know: the form, how many samples, the largest one's bytes, all bytes."""
    if table is None:
        return None
    sizes = table.sizes
    if isinstance(sizes, int):
        return table.form, table.num_rows, sizes, sizes * table.num_rows
    largest = max(8 * table.form.num_dims, int(sizes.max(initial=0)))
    return table.form, table.num_rows, largest, int(sizes.sum())


def _send_all(
    world: World, channel: Channel, table: Table | SourceRows, order: Order
) -> Exception | None:
    """The root's part: shapes first where rows differ, then rows, to all ranks in turn.

    Returns:
        What kept it from sending all rows; those that waited for more have been told.
    """
    outlet = Outlet(channel)
    parts = [table] if table.shapes is None else [Table(table.shapes), table]
    counts = {
        rank: len(parts) * count
        for rank in range(world.size)
        if rank != channel.root and (count := share_length(table.num_rows, rank, world.size))
    }
    try:
        for part in parts:
            _send_rows(world, channel, outlet, part, order, counts)
        outlet.drain()
    except CollectiveError:  # a rank is stuck: nothing more can be sent to anyone
        raise
    except Exception as error:  # the data may raise anything, and the others wait for rows
        outlet.fail([rank for rank, left in counts.items() if left])
        return error
    return None


def _send_rows(
    world: World,
    channel: Channel,
    outlet: Outlet,
    table: Table | SourceRows,
    order: Order,
    counts: dict[int, int],
) -> None:
    """Send all rows, and count down what each rank still waits for."""
    total = table.num_rows
    waiting = {}
    for rank in counts:
        sizes = table.sizes
        if not isinstance(sizes, int):
            sizes = sizes[order.between(rank, total, world.size)]
        count = share_length(total, rank, world.size)
        waiting[rank] = split_rows(sizes, count, channel.slot_bytes)
    while waiting:
        for rank in list(waiting):
            rows = next(waiting[rank], None)
            if rows is None:
                del waiting[rank]
                continue
            first, last = (rank + row * world.size for row in rows)
            samples = order.between(first, min(last, total), world.size)
            num_bytes = table.read(samples, outlet.slot())
            outlet.send(rank, len(samples), num_bytes)
            counts[rank] -= len(samples)


def _receive_all(world: World, channel: Channel, form: Form, total: int) -> Any:
    """The other ranks' part: this rank's rows; not all of them if the root has failed."""
    inlet = Inlet(channel)
    count = share_length(total, world.rank, world.size)
    shapes = None
    if form.varies:
        room, complete = _receive_rows(inlet, Arrivals(form.of_shapes(), count, None))
        if not complete:
            return None
        shapes = room.finish()
    room, _ = _receive_rows(inlet, Arrivals(form, count, shapes))
    return room.finish()


def _receive_rows(inlet: Inlet, room: Arrivals) -> tuple[Arrivals, bool]:
    """Take rows until all are there; False when the root has failed."""
    start = 0
    while start < room.num_rows:
        num_rows, data = inlet.receive()
        if num_rows == 0:
            return room, False
        room.write(slice(start, start + num_rows), data)
        inlet.release()
        start += num_rows
    return room, True
