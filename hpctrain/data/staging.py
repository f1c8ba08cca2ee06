"""Staging: a copy of the data on each node's own disk, made once, used by every later job there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain import log
from hpctrain.data.alike import require_alike
from hpctrain.data.storage.shards import digest_file
from hpctrain.errors import ConfigError, DataError
from hpctrain.world import World, agree

__all__ = ["Listing", "list_files", "stage"]

_DONE = "staged.json"
_BLOCK_BYTES = 8 << 20
_TELL_EVERY_S = 5.0
_LEAST_BYTES_PER_S = 10e6
"""Copies slower than this are aborted."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files under a path, with what shows whether they have changed."""

    files: tuple[tuple[str, int, int], ...]
    """Relative name, size in bytes, time of the last change in nanoseconds."""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size, _ in self.files)

    def key(self, source: Path) -> str:
        """A name for this state of this source. Pure."""
        text = json.dumps([str(source), self.files])
        return f"{source.name}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def stage(
    world: World,
    path: str | Path,
    *,
    to: str | Path | None = None,
    timeout_s: float | None = None,
) -> Path:
    """Collective: copy a file or a folder to each node's own disk; the arguments must match.

    One rank of each node copies, into a folder that appears only when everything is in it and its
    checksums are those of what was read. The next job that finds it there uses it, as long as
    names, sizes and times of the source are the same.

    Args:
        world: The ranks.
        path: The file or folder on the shared file system.
        to: A folder on the node's own disk; None takes the temporary folder of the node's first
            rank. Copies stay there until they are removed.
        timeout_s: How long to wait for ranks; as long again as the copy may take at 10 MB/s.
            None: as long as the world waits for any rank.

    Returns:
        The path of the copy.

    Raises:
        DataError: on all ranks: the source is missing, there is no space, or a copy is not equal.
        ConfigError: on all ranks: the arguments differ.
    """
    timeout_s = world.watching.limit_s(timeout_s)
    source = Path(path).absolute()
    require_alike(world, "stage", {"path": str(source), "to": str(to)}, timeout_s=timeout_s)
    listing, trouble = _examine(source)
    agree(world.comm, trouble, error=DataError, timeout_s=timeout_s)
    if len(set(world.comm.allgather(listing))) > 1:
        raise DataError(
            f"stage: {source} is not the same on all nodes; give a path on a shared file system, "
            "and do not write to it meanwhile"
        )
    # Some sites give every task a TMPDIR of its own: the first rank's is the node's.
    folder = world.node.bcast(tempfile.gettempdir() if to is None else str(to), root=0)
    base = Path(folder).absolute() / f"hpctrain-staged-{os.getuid()}"
    target = base / listing.key(source)
    trouble = None
    if world.local_rank == 0:
        trouble = _copy(source, listing, target, tell=world.rank == 0)
    patience_s = timeout_s + listing.num_bytes / _LEAST_BYTES_PER_S
    agree(world.comm, trouble, error=DataError, timeout_s=patience_s)
    copy = target / source.name
    trouble = None
    if not copy.exists():
        trouble = (
            f"stage: {copy}, made by the node's first rank, is not visible here; give a folder "
            "that all ranks of a node see, with to="
        )
    agree(world.comm, trouble, error=DataError, timeout_s=timeout_s)
    return copy


def list_files(source: Path) -> Listing:
    """What is under a path, in order.

    Raises:
        DataError: it is missing, or a link leads nowhere.
    """
    paths = [source] if source.is_file() else sorted(p for p in source.rglob("*") if not p.is_dir())
    found = []
    for path in paths:
        try:
            state = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror})") from error
        name = source.name if path == source else str(path.relative_to(source))
        found.append((name, state.st_size, state.st_mtime_ns))
    return Listing(tuple(found))


def _examine(source: Path) -> tuple[Listing, str | None]:
    if not source.exists():
        return Listing(()), f"stage: {source} is missing"
    try:
        return list_files(source), None
    except DataError as error:
        return Listing(()), f"stage: {error}"


def _copy(source: Path, listing: Listing, target: Path, *, tell: bool) -> str | None:
    """One rank's part: make the copy, or find it; returns what went wrong."""
    if _is_complete(target, listing):
        if tell:
            log.notice(f"stage: {target} exists already")
        return None
    try:
        _prepare(target.parent)
        free = shutil.disk_usage(target.parent).free
        if free < listing.num_bytes:
            return (
                f"stage: {target.parent} has {log.format_bytes(free)} free and {source} needs "
                f"{log.format_bytes(listing.num_bytes)}; give another folder with to=, or remove "
                "old copies there"
            )
        working = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _fill(source, listing, working, tell=tell)
            _move(working, target, listing)
        finally:
            shutil.rmtree(working, ignore_errors=True)
    except OSError as error:
        return f"stage: {source} cannot be copied to {target.parent} ({error})"
    except (ConfigError, DataError) as error:
        return f"stage: {error}"
    return None


def _prepare(base: Path) -> None:
    """A folder that belongs to this user alone: others could put their files into it."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = base.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise DataError(f"{base} belongs to another user; remove it, or give another folder by to=")


def _is_complete(target: Path, listing: Listing) -> bool:
    try:
        told = json.loads((target / _DONE).read_text())
    except (OSError, ValueError):
        return False
    wanted = {name: size for name, size, _ in listing.files}
    if {name: size for name, (size, _) in told.items()} != wanted:
        return False
    root = target / target.name.rpartition("-")[0]
    for name, size in wanted.items():
        path = root if root.is_file() else root / name
        if not path.is_file() or path.stat().st_size != size:
            return False
    return True


def _fill(source: Path, listing: Listing, working: Path, *, tell: bool) -> None:
    started = told_at = time.monotonic()
    digests: dict[str, tuple[int, str]] = {}
    done = 0
    for name, size, _ in listing.files:
        origin = source if source.is_file() else source / name
        copy = working / source.name if source.is_file() else working / source.name / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.blake2b(digest_size=16)
        with origin.open("rb") as read, copy.open("wb") as written:
            while block := read.read(_BLOCK_BYTES):
                digest.update(block)
                written.write(block)
                done += len(block)
                now = time.monotonic()
                if tell and now - told_at > _TELL_EVERY_S:
                    told_at = now
                    log.notice(_progress(source, done, listing.num_bytes, now - started))
            written.flush()
            os.fsync(written.fileno())
        if copy.stat().st_size != size or digest_file(copy) != digest.hexdigest():
            raise DataError(f"the copy of {origin} is not what was read; the disk may be broken")
        digests[name] = (size, digest.hexdigest())
    if source.is_dir():
        (working / source.name).mkdir(exist_ok=True)
    (working / _DONE).write_text(json.dumps(digests))
    if tell:
        log.notice(_progress(source, done, listing.num_bytes, time.monotonic() - started))


def _move(working: Path, target: Path, listing: Listing) -> None:
    """Let the copy appear; another job may have been faster, and then its copy is taken."""
    try:
        working.rename(target)
    except OSError:
        if not _is_complete(target, listing):  # damaged since it was made
            shutil.rmtree(target)
            working.rename(target)


def _progress(source: Path, done: int, whole: int, seconds: float) -> str:
    rate = done / max(seconds, 1e-9) / 1e6
    told = f"{log.format_bytes(done)} of {log.format_bytes(whole)}"
    return f"stage: {source.name}: {told}, {rate:.0f} MB/s"
