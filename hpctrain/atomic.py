"""Files that exist completely or not at all. Pure except for the disk.

A file is written under a temporary name next to it and renamed when it is complete: readers, also
after a crash, see the old one or the new one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["replacing", "sync_directory", "sync_file", "write_atomically"]


@contextmanager
def replacing(path: Path, *, sync: bool = False, replace: bool = True) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end of the block.

    The draft is on the same file system, so that the rename is one move. If the block raises, the
    draft is removed and `path` stays as it was.

    Args:
        path: The file to make or to replace.
        sync: Have the content on the disk before the rename, so that it also survives a crash of
            the machine. Costs a write to the disk.
        replace: Whether it may take the place of another; False: the first one stays.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield draft
        if sync:
            sync_file(draft)
        if replace:
            draft.replace(path)
        else:
            with suppress(FileExistsError):
                os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_atomically(
    path: Path, content: str | bytes, *, sync: bool = False, replace: bool = True
) -> None:
    """Write a small file in one move.

    Args:
        path: The file to make or to replace.
        content: Text is written as UTF-8.
        sync: Have the content on the disk first, as in `replacing`.
        replace: Whether it may take the place of another; False: the first one stays.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path, sync=sync, replace=replace) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
