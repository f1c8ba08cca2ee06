"""Shared memory that killed jobs have left behind: found, and removed on demand.

hpctrain's own blocks lose their names before they are used, so one is left only by a job that was
killed in that moment; MPI libraries leave theirs when a rank or mpirun is killed. A file counts as
left behind when it has such a name, belongs to this user, is older than a minute, and no process
has it open or mapped.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

__all__ = ["LEFTOVER_NAMES", "Leftover", "find_leftovers", "remove_leftovers"]

LEFTOVER_NAMES = {
    f"hpctrain-[0-9]*-{'[0-9a-f]' * 16}": "hpctrain",
    "mpich_shm_*": "MPICH",
    "vader_segment.*": "Open MPI",
    "sm_segment.*": "Open MPI",
    "osc_rdma.*": "Open MPI",
    "psm*_shm.*": "PSM",
}
"""By pattern, for Python and shells: how shared memory is named, and by whom."""
_YOUNGEST_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """A file that is no longer in use."""

    path: Path
    owner: str
    """Whose it was: hpctrain's or an MPI's."""
    num_bytes: int


def find_leftovers(
    folders: Sequence[Path] | None = None, *, youngest_s: float = _YOUNGEST_S
) -> list[Leftover]:
    """This user's forgotten shared memory, by name.

    Args:
        folders: Where to look; None: /dev/shm and the temporary folder.
        youngest_s: Files younger than this may still be on their way into use.
    """
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())] if folders is None else folders
    found: list[Leftover] = []
    for folder in dict.fromkeys(places):
        with contextlib.suppress(OSError):
            found += [one for path in sorted(folder.iterdir()) if (one := _judge(path, youngest_s))]
    used = _files_in_use() if found else set()
    return [one for one in found if (inode := _inode(one.path)) and inode not in used]


def _judge(path: Path, youngest_s: float) -> Leftover | None:
    owner = next((who for name, who in LEFTOVER_NAMES.items() if fnmatch(path.name, name)), None)
    if owner is None:
        return None
    try:
        facts = path.lstat()
    except OSError:
        return None  # gone meanwhile
    mine = facts.st_uid == os.getuid() and not path.is_symlink() and path.is_file()
    if not mine or time.time() - facts.st_mtime < youngest_s:
        return None
    return Leftover(path=path, owner=owner, num_bytes=facts.st_size)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None  # its job has removed it meanwhile


def _files_in_use() -> set[int]:
    """Inodes that some process of this user has open or mapped."""
    used: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            for line in (process / "maps").read_text().splitlines():
                words = line.split(maxsplit=5)
                if len(words) == 6:
                    used.add(int(words[4]))
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used.add(link.stat().st_ino)
    return used


def remove_leftovers(leftovers: Iterable[Leftover]) -> list[str]:
    """Remove them; why some could not be."""
    trouble = []
    for one in leftovers:
        try:
            one.path.unlink(missing_ok=True)
        except OSError as error:
            trouble.append(f"{one.path} could not be removed ({error.strerror})")
    return trouble
