"""The thread that writes while training runs, and how files become a checkpoint. No MPI.

Threads must not communicate, so writers tell rank 0 through the file system: when a part is on
disk, a small record of it appears next to it. Rank 0's thread waits for all records, writes the
manifest and renames the directory, which makes it a checkpoint. Ranks that wait for the end tell
rank 0 their records by MPI as well: some file systems show new files of other nodes late.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpctrain.atomic import sync_directory, write_atomically
from hpctrain.checkpoint.format import (
    BLOCK_BYTES,
    MANIFEST,
    TREE,
    FileSpec,
    Manifest,
    checkpoint_name,
    failure_name,
    parse_file,
    part_name,
    record_name,
    render_manifest,
)
from hpctrain.errors import CheckpointError
from hpctrain.log import name_ranks

__all__ = [
    "Background",
    "Record",
    "Records",
    "WriteTask",
    "finish",
    "write_own_part",
]

_NICENESS = 10
"""Training goes first: the writer uses idle time, or a tenth of a core if there is none."""
_CHUNK_BYTES = 2 << 20
"""A chunk is written and then checksummed while it is still in the processor's cache."""
_LONGEST_NAP_S = 0.5
_TWICE = "; another job saves into the same directory: end one, or give each its own"


class WriteTask:
    """Something that the thread does once, and how it went."""

    def __init__(self, work: Callable[[], None], what: str) -> None:
        self.what = what
        self.started = time.monotonic()
        self._work = work
        self._ended = threading.Event()
        self._trouble: str | None = None

    def run(self) -> None:
        """Do it; an exception is kept for the caller."""
        try:
            self._work()
        except CheckpointError as error:
            self._trouble = str(error)
        except Exception as error:  # an exception in a thread would be lost
            self._trouble = f"{self.what} failed: {type(error).__name__}: {error}"
        self._ended.set()

    @property
    def is_running(self) -> bool:
        """Whether it has not come to its end yet."""
        return not self._ended.is_set()

    def trouble(self, timeout_s: float) -> str | None:
        """What has gone wrong so far, or None; no end after `timeout_s` is trouble, too."""
        if self._ended.is_set():
            return self._trouble
        elapsed = time.monotonic() - self.started
        return self._too_slow(elapsed, timeout_s) if elapsed > timeout_s else None

    def outcome(self, timeout_s: float) -> str | None:
        """Wait for the end, until `timeout_s` after the beginning; what went wrong, or None."""
        left = self.started + timeout_s - time.monotonic()
        if self._ended.wait(max(0.0, left)):
            return self._trouble
        return self._too_slow(time.monotonic() - self.started, timeout_s)

    def _too_slow(self, elapsed_s: float, timeout_s: float) -> str:
        return (
            f"{self.what} has taken {elapsed_s:.0f} s and {timeout_s:g} s are allowed; "
            "the disk is too slow, or does not respond"
        )


class Background:
    """One thread, started at the first task, that runs one task after the other."""

    def __init__(self, cpus: Iterable[int] = (), *, low_priority: bool = True) -> None:
        """Make it.

        Args:
            cpus: Cores it may use; none leaves it those of the process.
            low_priority: Whether training goes first; not where training waits for it.
        """
        self._cpus = frozenset(cpus)
        self._low_priority = low_priority
        self._todo: list[WriteTask | None] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, task: WriteTask) -> None:
        """Hand an task over; returns at once."""
        with self._changed:
            self._todo.append(task)
            self._changed.notify()
        if self._thread is None:
            # A thread that hangs in a dead file system must not keep the process from ending.
            self._thread = threading.Thread(
                target=self._serve, name="hpctrain-checkpoint", daemon=True
            )
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread once it has nothing to do."""
        if self._thread is None:
            return
        with self._changed:
            self._todo.append(None)
            self._changed.notify()
        self._thread.join(timeout_s)
        self._thread = None

    def _serve(self) -> None:
        self._yield_cores()
        while True:
            with self._changed:
                while not self._todo:
                    self._changed.wait()
                task = self._todo.pop(0)
            if task is None:
                return
            task.run()

    def _yield_cores(self) -> None:
        """Leave the cores to training, as far as the system lets a thread choose for itself."""
        if self._low_priority:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        if self._cpus:
            with contextlib.suppress(OSError, AttributeError):
                os.sched_setaffinity(threading.get_native_id(), self._cpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A part that is on disk."""

    part: int
    file: FileSpec
    own: Mapping[int, tuple[int, int]]
    """By rank: offset of its own state behind the header, and its length."""


class Records:
    """The records known to rank 0, filled by several threads."""

    def __init__(self) -> None:
        self.parts: dict[int, Record] = {}
        self.failure: str | None = None
        self.changed = threading.Condition()

    def add(self, record: Record) -> None:
        """A part is on disk."""
        with self.changed:
            self.parts[record.part] = record
            self.changed.notify_all()

    def fail(self, why: str) -> None:
        """A part will never come."""
        with self.changed:
            self.failure = self.failure or why
            self.changed.notify_all()


def write_part(path: Path, data: memoryview, *, data_start: int) -> FileSpec:
    """Write a file to the disk, not only to the kernel's memory, and say what it is."""
    blocks = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for start in range(0, len(data), BLOCK_BYTES):
            blocks.append(_write_block(descriptor, data[start : start + BLOCK_BYTES]))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileSpec(
        name=path.name, num_bytes=len(data), blocks=tuple(blocks), data_start=data_start
    )


def _write_block(descriptor: int, block: memoryview) -> str:
    checksum = 0
    for start in range(0, len(block), _CHUNK_BYTES):
        chunk = block[start : start + _CHUNK_BYTES]
        checksum = zlib.crc32(chunk, checksum)
        done = 0
        while done < len(chunk):
            done += os.write(descriptor, chunk[done:])
    return f"{checksum:08x}"


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
        CheckpointError: the disk is full, or something else; rank 0 is notified if possible.
    """
    path = folder / part_name(part, num_parts)
    try:
        file = write_part(path, data, data_start=data_start)
        record = Record(part=part, file=file, own=own)
        write_atomically(folder / record_name(part), json.dumps(asdict(record)), sync=True)
        sync_directory(folder)
    except OSError as error:
        text = f"{path} could not be written ({error.strerror}){_cure(folder, error)}"
        with contextlib.suppress(OSError):
            (folder / failure_name(part)).write_text(text)
        raise CheckpointError(text) from error
    return record


def finish(
    draft: Manifest,
    folder: Path,
    writers: Sequence[int],
    tree_text: str,
    records: Records,
    *,
    deadline: float,
) -> Path:
    """Rank 0's part: wait for all parts, write tree and manifest, rename.

    Args:
        draft: The manifest without what only the files tell.
        folder: Where the checkpoint is until it is complete.
        writers: The rank that writes each part.
        tree_text: What is written as `tree.json`.
        records: Of the parts that are on disk.
        deadline: By the monotonic clock.

    Raises:
        CheckpointError: a part is missing, or something could not be written.
    """
    path = folder.parent / checkpoint_name(draft.number, draft.step)
    try:
        tree = write_part(folder / TREE, memoryview(tree_text.encode()), data_start=0)
        _await(path, folder, writers, records, deadline)
        parts = [records.parts[part] for part in range(len(writers))]
        manifest = replace(
            draft,
            saved_at=time.time(),
            tree=tree,
            parts=tuple(record.file for record in parts),
            own=None if draft.own is None else _own_places(parts, draft.num_ranks),
        )
        write_atomically(folder / MANIFEST, render_manifest(manifest), sync=True)
        for part in range(len(parts)):
            (folder / record_name(part)).unlink(missing_ok=True)
        sync_directory(folder)
        folder.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error.strerror})"
            f"{_TWICE if path.exists() else _cure(folder, error)}"
        ) from error
    return path


def _own_places(parts: Sequence[Record], num_ranks: int) -> tuple[tuple[int, int, int], ...]:
    found = {rank: (r.part, *place) for r in parts for rank, place in r.own.items()}
    return tuple(found[rank] for rank in range(num_ranks))


def _await(
    path: Path, folder: Path, writers: Sequence[int], records: Records, deadline: float
) -> None:
    """Wait until every part has a record, told or found in the file system."""
    nap = 0.002
    while True:
        missing = [p for p in range(len(writers)) if p not in records.parts]
        for part in missing:
            _look(folder, part, records)
        missing = [part for part in missing if part not in records.parts]
        if records.failure is not None:
            raise CheckpointError(records.failure)
        if not missing:
            return
        if time.monotonic() > deadline:
            ranks = name_ranks(writers[part] for part in missing)
            raise CheckpointError(
                f"{path}: the parts of {ranks} were not on disk in time; the disk is too "
                "slow there, or does not respond"
            )
        with records.changed:
            records.changed.wait(nap)
        nap = min(nap * 1.5, _LONGEST_NAP_S)


def _look(folder: Path, part: int, records: Records) -> None:
    try:
        told = json.loads((folder / record_name(part)).read_text())
        own = {int(rank): (int(a), int(b)) for rank, (a, b) in told["own"].items()}
        records.add(Record(part=part, file=parse_file(told["file"]), own=own))
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            records.fail((folder / failure_name(part)).read_text())


def _cure(folder: Path, error: OSError) -> str:
    if not folder.exists():
        return (
            "; its directory is missing: it must be on a file system that all nodes share, and no "
            "other job may save into it"
        )
    return "; make room, or save elsewhere"
