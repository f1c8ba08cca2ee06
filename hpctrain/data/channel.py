"""The way from one rank to the others: a few slots of memory, filled, announced, emptied.

The sender fills a slot and notifies its receiver. On the sender's own node the slots are
node-shared memory, and the receiver copies straight out of them while the sender fills the next:
each byte is moved once on either side, both at the same time. To other nodes a slot goes as
messages. All slots together are one chunk: more memory than that is not taken, whatever the number
of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from hpctrain import log
from hpctrain.data.table import MESSAGE_BYTES, split_bytes
from hpctrain.errors import CollectiveError, TimedOutError
from hpctrain.world import SharedBlock, World, allocate, finish

if TYPE_CHECKING:
    from mpi4py.MPI import Request

__all__ = ["Channel", "Inlet", "Outlet", "open_channel"]

_NUM_SLOTS = 2
_WORTH_SHARING_BYTES = 1 << 20
_TAG = 7421
_ACK_TAG = 7422
_BY_MESSAGE = -1


class Channel:
    """What both ends know.

    Args:
        world: The ranks.
        root: Who sends.
        slot_bytes: The size of a slot.
        block: The slots, on the root's node, and nothing on others; None sends everything as
            messages.
        message_bytes: The most bytes in one message.
        timeout_s: How long to wait for the other end.
    """

    def __init__(
        self,
        world: World,
        root: int,
        slot_bytes: int,
        block: SharedBlock | None,
        *,
        message_bytes: int,
        timeout_s: float,
    ) -> None:
        import torch

        self.world = world
        self.root = root
        self.slot_bytes = slot_bytes
        self.message_bytes = message_bytes
        self.timeout_s = timeout_s
        self.shared: list[np.ndarray] | None = None
        if block is not None and world.ranks[root].node_rank == world.node_rank:
            whole = block.tensor(torch.uint8, num_elements=_NUM_SLOTS * slot_bytes).numpy()
            self.shared = np.split(whole, _NUM_SLOTS)
        self._block = block

    def shares_memory(self, rank: int) -> bool:
        """Whether this rank reads the root's slots."""
        ranks = self.world.ranks
        return self.shared is not None and ranks[rank].node_rank == ranks[self.root].node_rank

    def close(self) -> None:
        """Give the slots back."""
        self.shared = None
        if self._block is not None:
            self._block.close()
            self._block = None


def open_channel(
    world: World,
    root: int,
    *,
    chunk_bytes: int,
    row_bytes: int,
    total_bytes: int,
    message_bytes: int = MESSAGE_BYTES,
    timeout_s: float,
) -> Channel:
    """Collective: prepare the way from the root to all others; all arguments must match.

    Args:
        world: The ranks.
        root: Who sends.
        chunk_bytes: Memory for all slots together.
        row_bytes: The largest row; a slot holds at least one.
        total_bytes: How much will be sent: shared memory is not used for small amounts.
        message_bytes: The most bytes in one message.
        timeout_s: How long either end waits for the other.
    """
    slot_bytes = max(chunk_bytes // _NUM_SLOTS, row_bytes, 1)
    slot_bytes = -(-slot_bytes // 64) * 64
    block = None
    if any(
        rank != root and info.node_rank == world.ranks[root].node_rank
        for rank, info in enumerate(world.ranks)
    ) and total_bytes >= min(_WORTH_SHARING_BYTES, 2 * chunk_bytes):
        here = world.ranks[root].node_rank == world.node_rank
        needed = _NUM_SLOTS * slot_bytes if here else 0
        try:
            block = allocate(world.comm, world.node, needed, what="chunks of a data set")
        except TimedOutError:
            raise
        except CollectiveError as error:  # on all ranks
            if world.rank == root:
                log.notice(f"data are sent by MPI messages, which is slower here: {error}")
    return Channel(world, root, slot_bytes, block, message_bytes=message_bytes, timeout_s=timeout_s)


class Outlet:
    """The root's end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._comm = channel.world.comm
        own = [np.empty(channel.slot_bytes, np.uint8) for _ in range(_NUM_SLOTS)]
        self._slots = own if channel.shared is None else channel.shared
        self._pending: list[tuple[int, list[Request]]] = [(-1, []) for _ in range(_NUM_SLOTS)]
        self._kept: list[object] = [None] * _NUM_SLOTS
        self._next = 0

    def slot(self) -> np.ndarray:
        """The memory to fill next, once its last reader is done with it."""
        self._finish(self._next)
        return self._slots[self._next]

    def send(self, rank: int, num_rows: int, num_bytes: int) -> None:
        """Tell a rank that the slot is filled for it."""
        number, self._next = self._next, (self._next + 1) % _NUM_SLOTS
        by_memory = num_rows > 0 and self._channel.shares_memory(rank)
        where = number if by_memory else _BY_MESSAGE
        header = np.array([where, num_rows, num_bytes], np.int64)
        requests = [self._comm.Isend(header, dest=rank, tag=_TAG)]
        if by_memory:
            ack = bytearray(1)
            requests.append(self._comm.Irecv(ack, source=rank, tag=_ACK_TAG))
            self._kept[number] = (header, ack)
        else:
            self._kept[number] = header
            data = self._slots[number]
            for start, stop in split_bytes(num_bytes, self._channel.message_bytes):
                requests.append(self._comm.Isend(data[start:stop], dest=rank, tag=_TAG))
        self._pending[number] = (rank, requests)

    def drain(self) -> None:
        """Wait until everything has been received."""
        for number in range(_NUM_SLOTS):
            self._finish(number)

    def fail(self, ranks: Iterable[int]) -> None:
        """Tell those that still wait for rows that none will come."""
        self.drain()
        for rank in ranks:
            self.slot()
            self.send(rank, 0, 0)
        self.drain()

    def _finish(self, number: int) -> None:
        rank, requests = self._pending[number]
        if requests:
            finish(requests, f"rank {rank} to take its rows", timeout_s=self._channel.timeout_s)
            self._pending[number] = (-1, [])


class Inlet:
    """A receiver's end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._comm = channel.world.comm
        self._own: np.ndarray | None = None
        self._from_memory = False

    def receive(self) -> tuple[int, np.ndarray]:
        """The next rows' number and bytes, which are there until `release`.

        No rows mean that the root has failed.
        """
        header = np.empty(3, np.int64)
        self._take(header)
        where, num_rows, num_bytes = (int(number) for number in header)
        self._from_memory = where != _BY_MESSAGE
        if self._channel.shared is not None and self._from_memory:
            return num_rows, self._channel.shared[where][:num_bytes]
        if self._own is None:
            self._own = np.empty(self._channel.slot_bytes, np.uint8)
        for start, stop in split_bytes(num_bytes, self._channel.message_bytes):
            self._take(self._own[start:stop])
        return num_rows, self._own[:num_bytes]

    def release(self) -> None:
        """Let the root fill the slot again."""
        if self._from_memory:
            sent = self._comm.Isend(bytearray(1), dest=self._channel.root, tag=_ACK_TAG)
            self._wait(sent)

    def _take(self, out: np.ndarray) -> None:
        self._wait(self._comm.Irecv(out, source=self._channel.root, tag=_TAG))

    def _wait(self, request: Request) -> None:
        finish(
            [request],
            f"rank {self._channel.root} to send rows",
            timeout_s=self._channel.timeout_s,
        )
