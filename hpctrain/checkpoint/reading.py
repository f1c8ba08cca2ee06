"""Reading a checkpoint on all ranks: each byte comes from the disk once in the whole job.

A few ranks read blocks in turn, each one ahead of its turn, check them, and send them to all. Where
ranks need different pieces, a rank reads itself what only it needs. The number of ranks that
wrote does not matter: tensors are put together from blocks of files, in whatever order they come.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.format import (
    TREE,
    Manifest,
    check_block,
    num_blocks,
    read_block,
    read_checked,
)
from hpctrain.checkpoint.layout import choose_ranks
from hpctrain.checkpoint.parts import FileRange, TensorSpec, Tree, parse_tree, unpack
from hpctrain.checkpoint.tree import Wanted, named_dtype, unflatten
from hpctrain.errors import CheckpointError
from hpctrain.pieces import Region
from hpctrain.world import World, roll_call

__all__ = ["Assembly", "blocks_of", "read_parts", "read_tree"]

_Block = tuple[int, int]


def read_tree(folder: Path, manifest: Manifest) -> Tree:
    """Read and check `tree.json`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    text = b"".join(
        bytes(block) for block in read_checked(folder, manifest.tree, manifest.block_bytes)
    )
    return parse_tree(text, folder / TREE)


class _Room:
    """Memory that bytes of files go to."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    def put(self, at: int, data: np.ndarray) -> None:
        self._memory[at : at + len(data)] = data


class _Scattered:
    """A stored block of which non-consecutive parts are needed.

    It is collected and, when its last byte has come, copied onward and forgotten.
    """

    def __init__(self, stored: Region, item_bytes: int) -> None:
        self._stored = stored
        self._item_bytes = item_bytes
        self._memory: np.ndarray | None = None
        self._num_missing = stored.num_elements * item_bytes
        self._onward: list[tuple[Region, np.ndarray]] = []

    def add(self, target: Region, memory: np.ndarray) -> None:
        """Which parts are needed, and where they go."""
        self._onward.append((target, memory))

    def put(self, at: int, data: np.ndarray) -> None:
        if self._memory is None:
            self._memory = np.empty(self._num_missing, np.uint8)
        self._memory[at : at + len(data)] = data
        self._num_missing -= len(data)
        if self._num_missing == 0:
            self._copy(self._memory.reshape(*self._stored.shape, self._item_bytes))
            self._memory = None

    def _copy(self, source: np.ndarray) -> None:
        for target, memory in self._onward:
            common = self._stored.overlap(target)
            if common is not None:
                into = memory.reshape(*target.shape, self._item_bytes)
                into[common.slices_in(target)] = source[common.slices_in(self._stored)]


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a file and where they belong."""

    start: int
    stop: int
    room: _Room | _Scattered
    at: int


class Assembly:
    """The memory for a state, filled block by block; each tensor has memory of its own."""

    def __init__(
        self,
        manifest: Manifest,
        tree: Tree,
        *,
        own_rank: int | None,
        wanted: Iterable[Wanted] | None = None,
        skeleton: object = None,
    ) -> None:
        """Make room.

        Args:
            manifest: Of the checkpoint.
            tree: Of the checkpoint.
            own_rank: Whose own state to read; None: none.
            wanted: The tensors, or pieces of them, to read; None: all tensors.
            skeleton: The tree's, with pieces where needed; None: the tree's own.

        Raises:
            CheckpointError: the tree does not fit the manifest.
        """
        self._manifest = manifest
        self._skeleton = tree.skeleton if skeleton is None else skeleton
        self.tensors: dict[Wanted, Tensor] = {}
        self._spans: list[list[_Span]] = [[] for _ in manifest.parts]
        self._own: np.ndarray | None = None
        for key in tree.tensors if wanted is None else wanted:
            name = key if isinstance(key, str) else key.name
            self._add_tensor(key, name, tree.tensors[name])
        if own_rank is not None and manifest.own is not None and own_rank < len(manifest.own):
            part, start, num_bytes = manifest.own[own_rank]
            self._own = np.empty(num_bytes, np.uint8)
            self._add_span(FileRange(part, start, num_bytes, 0), 0, num_bytes, _Room(self._own), 0)
        for spans in self._spans:
            spans.sort(key=lambda span: span.start)
        # One stored block may be needed several times: ends need not be in order.
        self._stops = [
            list(itertools.accumulate((span.stop for span in spans), max)) for spans in self._spans
        ]

    def _add_tensor(self, key: Wanted, name: str, spec: TensorSpec) -> None:
        dtype = named_dtype(spec.dtype)
        whole = Region.whole(spec.shape)
        targets = (whole,) if isinstance(key, str) else key.regions
        made = torch.empty(spec.shape if isinstance(key, str) else key.shape, dtype=dtype)
        self.tensors[key] = made
        item_bytes = made.element_size()
        num_bytes = made.numel() * item_bytes
        memory = made.reshape(-1).view(torch.uint8).numpy() if num_bytes else np.empty(0, np.uint8)
        rooms = []
        start = 0
        for target in targets:
            stop = start + target.num_elements * item_bytes
            rooms.append((target, memory[start:stop]))
            start = stop
        found = 0
        for stored, places in spec.places.items():
            _check_places(name, stored, places, item_bytes)
            self._add_stored(stored, places, rooms, item_bytes)
            found += stored.num_elements
        if found != whole.num_elements:
            raise CheckpointError(
                f"tensor {name} has {found * item_bytes} bytes of {whole.num_elements * item_bytes}"
            )

    def _add_stored(
        self,
        stored: Region,
        places: Iterable[FileRange],
        rooms: Iterable[tuple[Region, np.ndarray]],
        item_bytes: int,
    ) -> None:
        """Say where the bytes of a stored block go."""
        scattered: _Scattered | None = None
        for target, memory in rooms:
            common = stored.overlap(target)
            if common is None:
                continue
            source, into = common.run_in(stored), common.run_in(target)
            if source is None or into is None:
                scattered = scattered or _Scattered(stored, item_bytes)
                scattered.add(target, memory)
                continue
            room = _Room(memory[into.start * item_bytes : into.stop * item_bytes])
            for place in places:
                low = source.start * item_bytes
                self._add_span(place, low, source.stop * item_bytes, room, low)
        if scattered is not None:
            for place in places:
                self._add_span(place, 0, stored.num_elements * item_bytes, scattered, 0)

    def _add_span(
        self, place: FileRange, low: int, high: int, room: _Room | _Scattered, base: int
    ) -> None:
        """The needed bytes of a place: from `low` to `high` of the stored block."""
        parts = self._manifest.parts
        if not 0 <= place.part < len(parts):
            raise CheckpointError(f"part {place.part} of {len(parts)} is not there")
        begin = parts[place.part].data_start + place.start
        if begin + place.num_bytes > parts[place.part].num_bytes:
            raise CheckpointError(
                f"{parts[place.part].name} is shorter than its contents should be"
            )
        low, high = max(low, place.at), min(high, place.at + place.num_bytes)
        if low < high:
            start = begin + low - place.at
            self._spans[place.part].append(_Span(start, start + high - low, room, low - base))

    def is_wanted(self, part: int, start: int, stop: int) -> bool:
        """Whether any of these bytes of a file are needed."""
        return any(True for _ in self._wanted(part, start, stop))

    def take(self, part: int, start: int, data: np.ndarray) -> None:
        """Put the bytes of a file from `start` on where they belong."""
        stop = start + len(data)
        for span in self._wanted(part, start, stop):
            low, high = max(span.start, start), min(span.stop, stop)
            span.room.put(span.at + low - span.start, data[low - start : high - start])

    def _wanted(self, part: int, start: int, stop: int) -> Iterable[_Span]:
        first = bisect.bisect_right(self._stops[part], start)
        for span in itertools.islice(self._spans[part], first, None):
            if span.start >= stop:
                return
            if span.stop > start:
                yield span

    def state(self) -> object:
        """The whole tree, once all blocks have been taken."""
        return unflatten(self._skeleton, self.tensors)

    def own(self) -> object | None:
        """What the rank alone knew."""
        return None if self._own is None else unpack(self._own.data)


def _check_places(name: str, stored: Region, places: Iterable[FileRange], item_bytes: int) -> None:
    done, num_bytes = 0, stored.num_elements * item_bytes
    for place in places:
        if place.at != done:
            raise CheckpointError(f"tensor {name} has a hole at byte {done}")
        done += place.num_bytes
    if done != num_bytes:
        raise CheckpointError(f"tensor {name} has {done} bytes of {num_bytes}")


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
        assembly: What this rank needs of it.
        in_pieces: Whether ranks need different parts. Then only needed blocks are
            read, and a rank reads itself what only it needs.
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
    """Collective: the blocks that only this rank needs, and those that several need."""
    from mpi4py import MPI

    here, no_rank = world.rank, -world.size - 1
    mine = np.full((2, len(blocks)), no_rank, np.int64)
    for index, block in enumerate(blocks):
        part, start = block[0], block[1] * reader.block_bytes
        if assembly.is_wanted(part, start, start + reader.size(block)):
            mine[:, index] = here, -here
    both = np.empty_like(mine)
    world.comm.Allreduce(mine, both, op=MPI.MAX)
    last, first = both[0], -both[1]
    alone = [block for i, block in enumerate(blocks) if last[i] == first[i] == here]
    several = [block for i, block in enumerate(blocks) if last[i] != no_rank and last[i] > first[i]]
    return alone, several


def _read_alone(
    world: World,
    blocks: Sequence[_Block],
    reader: _Reader,
    assembly: Assembly,
    timeout_s: float,
) -> str | None:
    """Collective: each rank reads its own blocks; errors are the same on all ranks."""
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
