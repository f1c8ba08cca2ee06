"""One save, on all ranks: what each brings, who writes what, the copy, and the thread's task."""

from __future__ import annotations

import functools
import json
import math
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.agreeing import (
    NO_MARKS,
    Holdings,
    marks_of,
    refuse_differences,
    same_on_all,
)
from hpctrain.checkpoint.directory import (
    Keep,
    Neighbours,
    describe_owner,
    in_writing,
    next_number,
    retain,
    sweep,
)
from hpctrain.checkpoint.format import (
    OWNER,
    TREE,
    FileSpec,
    Manifest,
    checkpoint_name,
    partial_name,
)
from hpctrain.checkpoint.layout import (
    Item,
    Source,
    TensorSlice,
    assign,
    choose_ranks,
    divide,
    writer_of,
)
from hpctrain.checkpoint.parts import (
    Image,
    Staging,
    bytes_of,
    describe,
    items_of,
    lay_out,
    pack,
    render_tree,
)
from hpctrain.checkpoint.tree import Flat, flatten
from hpctrain.checkpoint.writing import (
    Record,
    Records,
    WriteTask,
    finish,
    write_own_part,
)
from hpctrain.errors import CheckpointError
from hpctrain.world import World, agree, note_checkpoint
from hpctrain.world import finish as finish_messages

__all__ = ["Prepared", "Saving", "Settings", "begin", "draft_manifest", "prepare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a rank brings to a save."""

    flat: Flat
    own: bytes | None
    step: int
    note: Any
    metrics: Mapping[str, float]


def prepare(
    state: object,
    *,
    step: int,
    own: object | None,
    note: object,
    metrics: Mapping[str, float] | None,
) -> Prepared:
    """Take apart what is to be saved. No communication.

    Raises:
        CheckpointError: something of it cannot be stored; the place is named.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step={step!r} must be a whole number of at least 0")
    noted = flatten(note)
    if noted.tensors or noted.pieces:
        raise CheckpointError("a note holds no tensors or arrays; put them into the state")
    try:
        numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metrics={metrics!r} must be numbers by name") from error
    return Prepared(
        flat=flatten(state),
        own=None if own is None else pack(own),
        step=step,
        note=noted.skeleton,
        metrics=numbers,
    )


def _versions() -> dict[str, str]:
    """Of what has written a checkpoint, for people."""
    import torch

    from hpctrain import __version__

    return {"hpctrain": __version__, "torch": str(torch.__version__)}


_TAG = 7412
_PIECE_TAG = 7413
_MESSAGE_BYTES = 1 << 30
"""MPI counts to 2**31 - 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all saves of a store have in common."""

    directory: Path
    keep: Keep
    writers_per_node: int | None
    timeout_s: float
    late_s: float

    def mistake(self) -> str | None:
        """An invalid setting, or None; raised by the caller on all ranks."""
        if self.writers_per_node is not None and self.writers_per_node < 1:
            return f"writers_per_node={self.writers_per_node} must be at least 1"
        if not self.timeout_s > 0:
            return f"timeout_s={self.timeout_s} must be above 0"
        if not self.late_s > 0:
            return f"late_s={self.late_s} must be above 0"
        return None


@dataclass(kw_only=True, slots=True)
class Saving:
    """A save that has begun, seen from one rank."""

    path: Path
    step: int
    task: WriteTask | None
    """None: this rank writes nothing."""
    records: Records | None
    """Rank 0 only: the list of all parts."""
    written: list[Record]
    """This rank's part, once it is on disk."""


def begin(
    world: World,
    settings: Settings,
    prepared: Prepared | None,
    trouble: str | None,
    staging: Staging,
    neighbours: Neighbours,
    holdings: Holdings,
) -> Saving:
    """Collective: copy this rank's part; the state's places, shapes and values must match.

    Args:
        world: The ranks.
        settings: The same on all ranks.
        prepared: What this rank brings, or None if it has trouble.
        trouble: What is wrong on this rank.
        staging: Where this rank's part is copied to.
        neighbours: Rank 0's: who saves into this directory.
        holdings: Who holds which pieces.

    Returns:
        The save, whose task is still to be started.

    Raises:
        CheckpointError: on all ranks, nothing is saved.
    """
    opened: tuple[Path, int] | None = None
    if world.rank == 0 and prepared is not None:
        opened, trouble = _open(world, settings.directory, prepared.step, neighbours)
    try:
        return _begin(world, settings, prepared, trouble, opened, staging, holdings)
    except CheckpointError:
        if opened is not None:
            in_writing.discard(opened[0])
            shutil.rmtree(opened[0], ignore_errors=True)
        raise


def _begin(
    world: World,
    settings: Settings,
    prepared: Prepared | None,
    trouble: str | None,
    opened: tuple[Path, int] | None,
    staging: Staging,
    holdings: Holdings,
) -> Saving:
    """Collective: compare what the ranks bring, and copy."""
    timeout_s = settings.timeout_s
    marks = None
    if prepared is not None and trouble is None:
        marks = marks_of(prepared.flat, step=prepared.step, has_own=prepared.own is not None)
    changed = prepared is not None and holdings.has_changed(prepared.flat)
    numbers = [marks is None, changed, *(marks or NO_MARKS)]
    same = same_on_all(world, numbers, "saving a checkpoint", timeout_s=timeout_s)
    any_changed = changed or not same.pop(1)
    if prepared is None or marks is None or not same[0]:
        agree(world.comm, trouble, error=CheckpointError, timeout_s=timeout_s)
        raise CheckpointError("nothing was prepared for saving")  # not reached: a rank said why
    if not all(same):
        refuse_differences(world, prepared.flat, marks)
    if prepared.flat.pieces:
        if any_changed:
            holdings.ask(world, prepared.flat)
        holdings.compare(world, prepared.flat, timeout_s=timeout_s)
    folder, number = world.comm.bcast(opened, root=0)
    saving, moves = None, Moves()
    try:
        saving, moves = _copy(world, settings, prepared, folder, number, staging, holdings)
    except (MemoryError, RuntimeError, OSError) as error:
        trouble = f"the state could not be copied ({type(error).__name__}: {error})"
    # No rank continues before all have copied: state may be in memory that ranks share.
    same = same_on_all(world, [saving is None], "copying a state", timeout_s=timeout_s)
    if saving is None or not same[0]:
        agree(world.comm, trouble, error=CheckpointError, timeout_s=timeout_s)
        raise CheckpointError("nothing was copied")  # not reached: a rank said why
    if prepared.flat.pieces:
        with world.watching.announce("sending pieces to their writers", timeout_s=timeout_s):
            moves.make(world, timeout_s=timeout_s)
    return saving


def _open(
    world: World, directory: Path, step: int, neighbours: Neighbours
) -> tuple[tuple[Path, int] | None, str | None]:
    """Rank 0's part: a directory for what is not complete yet."""
    try:
        other = neighbours.find_other_writer()
        if other is not None:
            return None, other
        number = next_number(directory)
        folder = directory / partial_name(number, step, secrets.token_hex(8))
        folder.mkdir()
        in_writing.add(folder)
        neighbours.wrote(number, step)
        (folder / OWNER).write_text(json.dumps(describe_owner(world.launch.job_id)))
    except (OSError, CheckpointError) as error:
        return None, f"{directory} cannot be written to ({error}); make room, or save elsewhere"
    return (folder, number), None


def _copy(
    world: World,
    settings: Settings,
    prepared: Prepared,
    folder: Path,
    number: int,
    staging: Staging,
    holdings: Holdings,
) -> tuple[Saving, Moves]:
    """Send this rank's own state to its writer; as a writer, copy its part."""
    flat = prepared.flat
    items = tuple(sorted(items_of(flat.tensors), key=lambda item: item.name))
    node_of = tuple(info.node_rank for info in world.ranks)
    num_bytes = sum(item.num_bytes for item in items) + sum(
        piece.tensor.element_size() * math.prod(piece.shape) for piece in flat.pieces.values()
    )
    writers = choose_ranks(node_of, num_bytes, settings.writers_per_node)
    if flat.pieces:
        widths = {name: piece.tensor.element_size() for name, piece in flat.pieces.items()}
        assigned, sources = assign(holdings.holders, widths, node_of, writers)
        parts = tuple(map(tuple, divide(items, len(writers), assigned)))
    else:
        sources = {}
        parts = _divide(items, len(writers))
    moves = Moves.plan(world.rank, flat, parts, writers, sources)
    with world.watching.announce("gathering each rank's own state"):
        own = _gather_own(world, prepared.own, node_of, writers)
    path = settings.directory / checkpoint_name(number, prepared.step)
    records = Records() if world.rank == 0 else None
    saving = Saving(path=path, step=prepared.step, task=None, records=records, written=[])
    if world.rank not in writers:
        return saving, moves
    part = writers.index(world.rank)
    image = lay_out(parts[part], flat, own)
    data = staging.fill(image, parts[part], flat.sources, own)
    moves.receive_into(data, image, parts[part])
    places = {rank: (image.own_starts[rank], len(own[rank])) for rank in own}
    draft = draft_manifest(prepared, number, num_ranks=world.size)
    described = describe(flat)
    deadline = time.monotonic() + settings.timeout_s

    def write() -> None:
        """Runs in the thread; the tensors themselves are none of its business."""
        try:
            record = write_own_part(
                folder, part, len(parts), data, data_start=len(image.header), own=places
            )
            saving.written.append(record)
            if records is not None:
                records.add(record)
                tree = render_tree(described, parts)
                finish(draft, folder, writers, tree, records, deadline=deadline)
                note_checkpoint(world.launch, settings.directory, prepared.step)
        finally:
            in_writing.discard(folder)
        if records is not None:
            retain(settings.directory, settings.keep)
            sweep(settings.directory, describe_owner(world.launch.job_id))

    saving.task = WriteTask(write, f"writing {path}")
    return saving, moves


class Moves:
    """Pieces that are sent to a writer, because no rank that holds them writes."""

    def __init__(self) -> None:
        self._outgoing: list[tuple[int, memoryview]] = []
        self._sources: dict[Source, int] = {}
        self._incoming: list[tuple[int, memoryview]] = []

    @classmethod
    def plan(
        cls,
        rank: int,
        flat: Flat,
        parts: Sequence[Sequence[TensorSlice]],
        writers: Sequence[int],
        sources: Mapping[Source, int],
    ) -> Moves:
        """Copy what this rank sends, and note what it receives. No communication."""
        moves = cls()
        held = flat.held()
        for writer, segments in zip(writers, parts, strict=True):
            for segment in segments:
                if segment.region is None or sources[segment.source] == writer:
                    continue
                if sources[segment.source] == rank:
                    data = bytes_of(held[segment.name, segment.region]).numpy().data
                    moves._outgoing.append((writer, data))
                elif writer == rank:
                    moves._sources[segment.source] = sources[segment.source]
        return moves

    def receive_into(self, data: memoryview, image: Image, segments: Sequence[TensorSlice]) -> None:
        """Say where in this rank's file the pieces go that it receives."""
        base = len(image.header)
        for segment, start in zip(segments, image.starts, strict=True):
            if segment.source in self._sources:
                room = data[base + start : base + start + segment.num_bytes]
                self._incoming.append((self._sources[segment.source], room))

    def make(self, world: World, *, timeout_s: float) -> None:
        """Collective: send and receive. Both sides go through the parts in one order.

        Raises:
            TimedOutError: a message did not arrive in time.
        """
        requests = [
            world.comm.Irecv(message, source=source, tag=_PIECE_TAG)
            for source, room in self._incoming
            for message in _messages(room)
        ]
        requests += [
            world.comm.Isend(message, dest=target, tag=_PIECE_TAG)
            for target, data in self._outgoing
            for message in _messages(data)
        ]
        finish_messages(requests, "pieces of a checkpoint", timeout_s=timeout_s)


def _messages(data: memoryview) -> Iterator[memoryview]:
    """Bytes in messages that MPI can count."""
    for start in range(0, len(data), _MESSAGE_BYTES):
        yield data[start : start + _MESSAGE_BYTES]


@functools.lru_cache(maxsize=4)
def _divide(items: tuple[Item, ...], num_parts: int) -> tuple[tuple[TensorSlice, ...], ...]:
    return tuple(tuple(segments) for segments in divide(items, num_parts))


def draft_manifest(prepared: Prepared, number: int, *, num_ranks: int) -> Manifest:
    """What is known of a checkpoint before its files are written."""
    return Manifest(
        number=number,
        step=prepared.step,
        saved_at=0.0,
        num_ranks=num_ranks,
        versions=_versions(),
        tree=FileSpec(name=TREE, num_bytes=0, blocks=()),
        parts=(),
        own=None if prepared.own is None else (),
        metrics=prepared.metrics,
        note=prepared.note,
        version=2 if prepared.flat.pieces else 1,
    )


def _gather_own(
    world: World, blob: bytes | None, node_of: tuple[int, ...], writers: tuple[int, ...]
) -> dict[int, bytes]:
    """Collective: what ranks alone know, by rank, at the ranks that write it."""
    if blob is None:
        return {}
    targets = [writers[part] for part in writer_of(node_of, writers)]
    mine = [rank for rank, target in enumerate(targets) if target == world.rank]
    target = targets[world.rank]
    sent = world.comm.isend(blob, dest=target, tag=_TAG) if target != world.rank else None
    own = {
        rank: blob if rank == world.rank else world.comm.recv(source=rank, tag=_TAG)
        for rank in mine
    }
    if sent is not None:
        sent.wait()
    return own
