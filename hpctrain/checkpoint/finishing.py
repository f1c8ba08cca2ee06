"""From files to a checkpoint: writers leave records, rank 0 waits for them and renames. No MPI.

Threads must not communicate, so writers tell rank 0 through the file system: when a part is on
disk, a small record of it appears beside it. Rank 0's thread waits for all records, writes the
manifest and renames the directory, which makes it a checkpoint. Ranks that wait for the end tell
rank 0 their records by MPI as well: some file systems show new files of other nodes late.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.manifest import FileSpec, Manifest, parse_file, render_manifest
from hpctrain.checkpoint.naming import (
    MANIFEST,
    TREE,
    checkpoint_name,
    failure_name,
    part_name,
    record_name,
)
from hpctrain.checkpoint.part import sync_directory, write_part, write_text
from hpctrain.errors import CheckpointError
from hpctrain.log import format_ranges

__all__ = ["OWNER", "Outline", "Record", "Records", "finish", "write_own_part"]

OWNER = "owner.json"
_LONGEST_NAP_S = 0.5
_TWICE = "; another job saves into the same directory: end one, or give each its own"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A part that is on disk."""

    part: int
    file: FileSpec
    own: Mapping[int, tuple[int, int]]
    """By rank: where what it alone knows begins behind the header, and how long it is."""


class Records:
    """The records that rank 0 knows of, filled by several threads."""

    def __init__(self) -> None:
        self.parts: dict[int, Record] = {}
        self.failure: str | None = None
        self.changed = threading.Condition()

    def tell(self, record: Record) -> None:
        """A part is on disk."""
        with self.changed:
            self.parts[record.part] = record
            self.changed.notify_all()

    def give_up(self, why: str) -> None:
        """A part will never come."""
        with self.changed:
            self.failure = self.failure or why
            self.changed.notify_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """What rank 0 knows of a checkpoint before its parts are written."""

    directory: Path
    folder: Path
    """Where it is until it is complete."""
    number: int
    step: int
    writers: Sequence[int]
    """The rank that writes each part."""
    num_ranks: int
    has_own: bool
    versions: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: Any = None
    version: int = 1
    """Of the format."""

    @property
    def path(self) -> Path:
        """Where it will be."""
        return self.directory / checkpoint_name(self.number, self.step)


def write_own_part(
    folder: Path,
    part: int,
    num_parts: int,
    data: memoryview,
    *,
    data_start: int,
    own: Mapping[int, tuple[int, int]],
) -> Record:
    """Write this rank's part and leave a record of it.

    Raises:
        CheckpointError: the disk is full, or something else; rank 0 is told if it can be.
    """
    path = folder / part_name(part, num_parts)
    try:
        file = write_part(path, data, data_start=data_start)
        record = Record(part=part, file=file, own=own)
        write_text(folder / record_name(part), json.dumps(asdict(record)))
        sync_directory(folder)
    except OSError as error:
        text = f"{path} could not be written ({error.strerror}){_cure(folder, error)}"
        with contextlib.suppress(OSError):
            (folder / failure_name(part)).write_text(text)
        raise CheckpointError(text) from error
    return record


def finish(outline: Outline, tree_text: str, records: Records, *, deadline: float) -> Path:
    """Rank 0's part: wait for all parts, write tree and manifest, rename.

    Raises:
        CheckpointError: a part did not come, or something could not be written.
    """
    try:
        tree = write_part(outline.folder / TREE, memoryview(tree_text.encode()), data_start=0)
        _await(outline, records, deadline)
        parts = [records.parts[part] for part in range(len(outline.writers))]
        manifest = Manifest(
            number=outline.number,
            step=outline.step,
            saved_at=time.time(),
            num_ranks=outline.num_ranks,
            versions=outline.versions,
            tree=tree,
            parts=tuple(record.file for record in parts),
            own=_own_places(parts, outline.num_ranks) if outline.has_own else None,
            metrics=outline.metrics,
            note=outline.note,
            version=outline.version,
        )
        write_text(outline.folder / MANIFEST, render_manifest(manifest))
        for part in range(len(parts)):
            (outline.folder / record_name(part)).unlink(missing_ok=True)
        sync_directory(outline.folder)
        outline.folder.rename(outline.path)
        sync_directory(outline.directory)
    except OSError as error:
        raise CheckpointError(
            f"{outline.path} could not be written ({error.strerror})"
            f"{_TWICE if outline.path.exists() else _cure(outline.folder, error)}"
        ) from error
    return outline.path


def _own_places(parts: Sequence[Record], num_ranks: int) -> tuple[tuple[int, int, int], ...]:
    found = {rank: (r.part, *place) for r in parts for rank, place in r.own.items()}
    return tuple(found[rank] for rank in range(num_ranks))


def _await(outline: Outline, records: Records, deadline: float) -> None:
    """Wait until every part has a record, told or found in the file system."""
    nap = 0.002
    while True:
        missing = [p for p in range(len(outline.writers)) if p not in records.parts]
        for part in missing:
            _look(outline.folder, part, records)
        missing = [part for part in missing if part not in records.parts]
        if records.failure is not None:
            raise CheckpointError(records.failure)
        if not missing:
            return
        if time.monotonic() > deadline:
            ranks = format_ranges((outline.writers[part] for part in missing), limit=16)
            raise CheckpointError(
                f"{outline.path}: the parts of rank {ranks} were not on disk in time; the disk is "
                "too slow there, or does not answer"
            )
        with records.changed:
            records.changed.wait(nap)
        nap = min(nap * 1.5, _LONGEST_NAP_S)


def _look(folder: Path, part: int, records: Records) -> None:
    try:
        told = json.loads((folder / record_name(part)).read_text())
        own = {int(rank): (int(a), int(b)) for rank, (a, b) in told["own"].items()}
        records.tell(Record(part=part, file=parse_file(told["file"]), own=own))
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            records.give_up((folder / failure_name(part)).read_text())


def _cure(folder: Path, error: OSError) -> str:
    if not folder.exists():
        return (
            "; its directory is not there: it must be on a file system that all nodes share, and "
            "no other job may save into it"
        )
    return "; make room, or save elsewhere"
