"""Damage done from outside: to checkpoints, and to the disk that they are on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hpctrain.checkpoint import Entry, list_checkpoints, verify

__all__ = ["SmallDisk", "flip_byte", "num_bytes_of", "truncate", "valid_checkpoints"]

_PAGE_BYTES = 4096
_NUM_CHECKPOINTS = 6
"""What fits on a small disk: three that are kept, one being written, and two more."""


def valid_checkpoints(directory: Path) -> list[Entry]:
    """Those whose every byte is right, oldest first."""
    return [entry for entry in list_checkpoints(directory) if not verify(entry.path)]


def num_bytes_of(checkpoint: Path) -> int:
    """What a checkpoint takes."""
    return sum(file.stat().st_size for file in checkpoint.iterdir())


def truncate(checkpoint: Path) -> None:
    """Cut the largest file of a checkpoint in half."""
    file = _largest(checkpoint)
    os.truncate(file, file.stat().st_size // 2)


def flip_byte(checkpoint: Path) -> None:
    """Change one byte in the last quarter of the largest file, where the tensors are."""
    file = _largest(checkpoint)
    place = file.stat().st_size * 7 // 8
    with file.open("r+b") as opened:
        opened.seek(place)
        old = opened.read(1)
        opened.seek(place)
        opened.write(bytes([old[0] ^ 0x10]))


def _largest(checkpoint: Path) -> Path:
    return max(checkpoint.iterdir(), key=lambda file: file.stat().st_size)


class SmallDisk:
    """A file system in memory, with room for a few checkpoints; where mounting is allowed.

    Args:
        folder: Where it is mounted; must be there.
        checkpoint_bytes: What one checkpoint takes.
    """

    def __init__(self, folder: Path, checkpoint_bytes: int) -> None:
        self._folder = folder
        self._spare = max(_PAGE_BYTES, checkpoint_bytes // 2 // _PAGE_BYTES * _PAGE_BYTES)
        size = _NUM_CHECKPOINTS * (checkpoint_bytes + 16 * _PAGE_BYTES)
        self.is_mounted = os.geteuid() == 0 and _ask(
            "mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)
        )

    @property
    def _filler(self) -> Path:
        return self._folder / "filler"

    def fill(self) -> None:
        """Leave room for half a checkpoint."""
        facts = os.statvfs(self._folder)
        wanted = facts.f_bavail * facts.f_frsize - self._spare
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(wanted, 1))

    def empty(self) -> None:
        """Make room again."""
        self._filler.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Take it away, with what is on it."""
        if self.is_mounted:
            self.is_mounted = not _ask("umount", str(self._folder))


def _ask(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
