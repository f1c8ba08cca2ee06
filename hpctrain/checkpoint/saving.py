"""One save, on all ranks: who writes what, the copy, and the errand of the writing thread."""

from __future__ import annotations

import functools
import json
import math
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.alike import NOTHING, mark_of, refuse_differences
from hpctrain.checkpoint.background import Errand
from hpctrain.checkpoint.catalog import next_number
from hpctrain.checkpoint.company import Company
from hpctrain.checkpoint.finishing import OWNER, Outline, Record, Records, finish, write_own_part
from hpctrain.checkpoint.flattening import Flat
from hpctrain.checkpoint.holding import Holdings
from hpctrain.checkpoint.layout import (
    Item,
    Segment,
    Source,
    assign,
    choose_ranks,
    divide,
    writer_of,
)
from hpctrain.checkpoint.meeting import meet
from hpctrain.checkpoint.naming import checkpoint_name, partial_name
from hpctrain.checkpoint.part import Image, Staging, bytes_of, lay_out
from hpctrain.checkpoint.preparing import Prepared, versions
from hpctrain.checkpoint.removing import describe_owner, in_writing, retain, sweep
from hpctrain.checkpoint.retention import Keep
from hpctrain.checkpoint.tree_file import describe, items_of, render_tree
from hpctrain.errors import CheckpointError
from hpctrain.world import World, agree, note_checkpoint

__all__ = ["Saving", "Settings", "begin"]

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
        """What cannot be meant, or None; raised by whoever has asked all ranks."""
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
    errand: Errand | None
    """None: this rank writes nothing."""
    records: Records | None
    """Rank 0 alone: what it knows of all parts."""
    written: list[Record]
    """This rank's part, once it is on disk."""


def begin(
    world: World,
    settings: Settings,
    prepared: Prepared | None,
    trouble: str | None,
    staging: Staging,
    company: Company,
    holdings: Holdings,
) -> Saving:
    """Collective: copy this rank's part; the state's places, shapes and values must match.

    Args:
        world: The ranks.
        settings: The same on all ranks.
        prepared: What this rank brings, or None if it has trouble.
        trouble: What is wrong on this rank.
        staging: Where this rank's part is copied to.
        company: Rank 0's: who saves into this directory.
        holdings: Who holds which pieces.

    Returns:
        The save, whose errand is still to be started.

    Raises:
        CheckpointError: on all ranks, nothing is saved.
    """
    opened: tuple[Path, int] | None = None
    if world.rank == 0 and prepared is not None:
        opened, trouble = _open(world, settings.directory, prepared.step, company)
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
    mark = NOTHING if prepared is None or trouble is not None else mark_of(prepared)
    changed = prepared is not None and holdings.has_changed(prepared.flat)
    numbers = [mark is NOTHING, changed, *mark.numbers]
    same = meet(world, numbers, "saving a checkpoint", timeout_s=timeout_s)
    any_changed = changed or not same.pop(1)
    if prepared is None or mark is NOTHING or not same[0]:
        agree(world.comm, trouble, error=CheckpointError, timeout_s=timeout_s)
        raise CheckpointError("nothing was prepared to be saved")  # not reached: a rank said why
    if not all(same):
        refuse_differences(world, prepared.flat, mark)
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
    # Nobody goes on before all have copied: state may lie in memory that ranks share.
    same = meet(world, [saving is None], "copying a state", timeout_s=timeout_s)
    if saving is None or not same[0]:
        agree(world.comm, trouble, error=CheckpointError, timeout_s=timeout_s)
        raise CheckpointError("nothing was copied")  # not reached: a rank said why
    if prepared.flat.pieces:
        with world.watching.announce("sending pieces to their writers", timeout_s=timeout_s):
            moves.make(world)
    return saving


def _open(
    world: World, directory: Path, step: int, company: Company
) -> tuple[tuple[Path, int] | None, str | None]:
    """Rank 0's part: a directory for what is not complete yet."""
    try:
        stranger = company.find_stranger()
        if stranger is not None:
            return None, stranger
        number = next_number(directory)
        folder = directory / partial_name(number, step, secrets.token_hex(8))
        folder.mkdir()
        in_writing.add(folder)
        company.wrote(number, step)
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
    """Send what this rank alone knows to its writer; as a writer, copy one's part."""
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
    with world.watching.announce("gathering what each rank knows alone"):
        own = _gather_own(world, prepared.own, node_of, writers)
    path = settings.directory / checkpoint_name(number, prepared.step)
    records = Records() if world.rank == 0 else None
    saving = Saving(path=path, step=prepared.step, errand=None, records=records, written=[])
    if world.rank not in writers:
        return saving, moves
    part = writers.index(world.rank)
    image = lay_out(parts[part], flat, own)
    data = staging.fill(image, parts[part], flat.sources, own)
    moves.receive_into(data, image, parts[part])
    places = {rank: (image.own_starts[rank], len(own[rank])) for rank in own}
    outline = _outline(world, settings, prepared, folder, number, writers)
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
                records.tell(record)
                finish(outline, render_tree(described, parts), records, deadline=deadline)
                note_checkpoint(world.launch, settings.directory, prepared.step)
        finally:
            in_writing.discard(folder)
        if records is not None:
            retain(settings.directory, settings.keep)
            sweep(settings.directory, describe_owner(world.launch.job_id))

    saving.errand = Errand(write, f"writing {path}")
    return saving, moves


class Moves:
    """Pieces that travel to a rank that writes them, because no rank that holds them writes."""

    def __init__(self) -> None:
        self._outgoing: list[tuple[int, np.ndarray]] = []
        self._sources: dict[Source, int] = {}
        self._incoming: list[tuple[int, memoryview]] = []

    @classmethod
    def plan(
        cls,
        rank: int,
        flat: Flat,
        parts: Sequence[Sequence[Segment]],
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
                    data = bytes_of(held[segment.name, segment.region]).numpy()
                    moves._outgoing.append((writer, data))
                elif writer == rank:
                    moves._sources[segment.source] = sources[segment.source]
        return moves

    def receive_into(self, data: memoryview, image: Image, segments: Sequence[Segment]) -> None:
        """Say where in this rank's file the pieces go that it receives."""
        base = len(image.header)
        for segment, start in zip(segments, image.starts, strict=True):
            if segment.source in self._sources:
                room = data[base + start : base + start + segment.num_bytes]
                self._incoming.append((self._sources[segment.source], room))

    def make(self, world: World) -> None:
        """Collective: send and receive. Both sides go through the parts in one order."""
        requests = [
            world.comm.Irecv(room[start : start + _MESSAGE_BYTES], source=source, tag=_PIECE_TAG)
            for source, room in self._incoming
            for start in range(0, len(room), _MESSAGE_BYTES)
        ]
        for target, data in self._outgoing:
            for start in range(0, len(data), _MESSAGE_BYTES):
                message = data[start : start + _MESSAGE_BYTES]
                world.comm.Send(message, dest=target, tag=_PIECE_TAG)
        for request in requests:
            request.Wait()


@functools.lru_cache(maxsize=4)
def _divide(items: tuple[Item, ...], num_parts: int) -> tuple[tuple[Segment, ...], ...]:
    return tuple(tuple(segments) for segments in divide(items, num_parts))


def _outline(
    world: World,
    settings: Settings,
    prepared: Prepared,
    folder: Path,
    number: int,
    writers: tuple[int, ...],
) -> Outline:
    return Outline(
        directory=settings.directory,
        folder=folder,
        number=number,
        step=prepared.step,
        writers=writers,
        num_ranks=world.size,
        has_own=prepared.own is not None,
        versions=versions(),
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
