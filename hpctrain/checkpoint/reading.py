"""Reading a checkpoint on all ranks: each byte comes from the disk once in the whole job.

A few ranks read blocks in turn, each one ahead of its turn, check them, and send them to all. The
number of ranks that wrote does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.assembling import Assembly
from hpctrain.checkpoint.checksums import check_block, num_blocks, read_block
from hpctrain.checkpoint.layout import choose_ranks
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.errors import CheckpointError
from hpctrain.world import World, roll_call

__all__ = ["blocks_of", "read_parts"]

_Block = tuple[int, int]


def blocks_of(manifest: Manifest) -> list[_Block]:
    """All blocks of all parts: first of each part, then second of each. Pure.

    Raises:
        CheckpointError: a part has more or fewer checksums than blocks.
    """
    counts = []
    for file in manifest.parts:
        counts.append(num_blocks(file.num_bytes, manifest.block_bytes))
        if counts[-1] != len(file.blocks):
            raise CheckpointError(
                f"{file.name} has {len(file.blocks)} checksums for {counts[-1]} blocks"
            )
    most = max(counts, default=0)
    return [(part, b) for b in range(most) for part, count in enumerate(counts) if b < count]


def read_parts(
    world: World,
    folder: Path,
    manifest: Manifest,
    assembly: Assembly,
    *,
    in_pieces: bool = False,
    timeout_s: float,
) -> str | None:
    """Collective: read all parts into `assembly`; all arguments but it must match.

    Args:
        world: The ranks.
        folder: Of the checkpoint.
        manifest: Of the checkpoint.
        assembly: What this rank wants of it.
        in_pieces: Whether ranks want different things. Then only blocks that somebody wants are
            read, and what one rank alone wants it reads itself.
        timeout_s: How long the disk may take.

    Returns:
        The same on all ranks: what is wrong with the checkpoint, or None.
    """
    roll_call(world.comm, f"reading {folder}", timeout_s=timeout_s)
    blocks = blocks_of(manifest)
    readers = choose_ranks([info.node_rank for info in world.ranks], manifest.num_bytes)
    with ExitStack() as stack:
        reader = _Reader(folder, manifest, stack)
        if in_pieces and world.size > 1:
            alone, blocks = _vote(world, blocks, reader, assembly)
            trouble = _read_alone(world, alone, reader, assembly, timeout_s)
            if trouble is not None:
                return trouble
        mine = [
            block for turn, block in enumerate(blocks) if readers[turn % len(readers)] == world.rank
        ]
        return _stream(world, readers, blocks, mine, reader, assembly, timeout_s)


def _vote(
    world: World, blocks: Sequence[_Block], reader: _Reader, assembly: Assembly
) -> tuple[list[_Block], list[_Block]]:
    """Collective: the blocks that this rank alone wants, and those that several want."""
    from mpi4py import MPI

    here, nobody = world.rank, -world.size - 1
    mine = np.full((2, len(blocks)), nobody, np.int64)
    for index, block in enumerate(blocks):
        part, start = block[0], block[1] * reader.block_bytes
        if assembly.is_wanted(part, start, start + reader.size(block)):
            mine[:, index] = here, -here
    both = np.empty_like(mine)
    world.comm.Allreduce(mine, both, op=MPI.MAX)
    last, first = both[0], -both[1]
    alone = [block for i, block in enumerate(blocks) if last[i] == first[i] == here]
    several = [block for i, block in enumerate(blocks) if last[i] != nobody and last[i] > first[i]]
    return alone, several


def _read_alone(
    world: World,
    blocks: Sequence[_Block],
    reader: _Reader,
    assembly: Assembly,
    timeout_s: float,
) -> str | None:
    """Collective: each rank reads its own blocks; what is wrong is the same on all ranks."""
    trouble = None
    with world.watching.patience(timeout_s):  # the disk may be slow
        ahead = reader.start(blocks[0]) if blocks else None
        for turn, (part, number) in enumerate(blocks):
            if ahead is None:
                break
            data, trouble = ahead.result()
            if trouble is not None:
                break
            ahead = reader.start(blocks[turn + 1]) if turn + 1 < len(blocks) else None
            size = reader.size((part, number))
            assembly.take(part, number * reader.block_bytes, data[:size])
    told: list[str | None] = world.comm.allgather(trouble)
    return next((text for text in told if text), None)


def _stream(
    world: World,
    readers: Sequence[int],
    blocks: Sequence[_Block],
    mine: Sequence[_Block],
    reader: _Reader,
    assembly: Assembly,
    timeout_s: float,
) -> str | None:
    from mpi4py import MPI

    largest = max((reader.size(block) for block in blocks), default=0)
    received = np.empty(largest + 1, np.uint8)
    ahead = reader.start(mine[0]) if mine else None
    taken = 0
    for turn, block in enumerate(blocks):
        root = readers[turn % len(readers)]
        size = reader.size(block)
        data, trouble = received, None
        if root == world.rank and ahead is not None:
            with world.watching.patience(timeout_s):  # the disk may be slow
                data, trouble = ahead.result()
            taken += 1
            ahead = reader.start(mine[taken]) if taken < len(mine) else None
        if world.size > 1:
            # The last byte says whether the block is good.
            world.comm.Bcast([data, size + 1, MPI.BYTE], root=root)
        if not data[size]:
            told: str = world.comm.bcast(trouble, root=root)
            return told
        part, number = block
        assembly.take(part, number * reader.block_bytes, data[:size])
    return None


class _Reader:
    """Reads blocks in a thread of its own, one ahead of the one that is being sent."""

    def __init__(self, folder: Path, manifest: Manifest, stack: ExitStack) -> None:
        self.block_bytes = manifest.block_bytes
        self._folder = folder
        self._parts = manifest.parts
        self._stack = stack
        self._open: dict[int, int] = {}
        self._pool = stack.enter_context(ThreadPoolExecutor(1, "hpctrain-reading"))
        self._rooms: list[np.ndarray] = []

    def size(self, block: _Block) -> int:
        part, number = block
        return min(self.block_bytes, self._parts[part].num_bytes - number * self.block_bytes)

    def start(self, block: _Block) -> Future[tuple[np.ndarray, str | None]]:
        """Begin to read a block into one of two rooms, the one that is not being sent."""
        if len(self._rooms) < 2:
            self._rooms.append(np.empty(self.block_bytes + 1, np.uint8))
        self._rooms.reverse()
        return self._pool.submit(self._read, block, self._rooms[0])

    def _read(self, block: _Block, room: np.ndarray) -> tuple[np.ndarray, str | None]:
        part, number = block
        file, size = self._parts[part], self.size(block)
        path = self._folder / file.name
        room[size] = 0
        try:
            if part not in self._open:
                self._open[part] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._stack.callback(os.close, self._open[part])
            wanted = room.data[:size]
            start = number * self.block_bytes
            data = wanted[: read_block(self._open[part], start, wanted)]
            check_block(path, file, number, data, self.block_bytes)
        except FileNotFoundError:
            return room, f"{path} is missing"
        except OSError as error:
            return room, f"{path} cannot be read ({error.strerror})"
        except CheckpointError as error:
            return room, str(error)
        room[size] = 1
        return room, None
