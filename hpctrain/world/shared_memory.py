"""Memory that all ranks of a node share.

A block is an unnamed file in memory that every rank of the node maps. Space is looked for before,
reserved slice by slice by the rank that owns the slice (so that its pages are near that rank), and
agreed upon by all ranks of the job; the file is unlinked before it is used, so nothing
is left behind whatever ends the job. Tensors keep the mapping alive: using one after the world has
ended is safe.

Nothing here orders reads and writes of different ranks: that is what barriers are for.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import mmap
import os
import resource
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hpctrain.errors import CollectiveError
from hpctrain.log import format_bytes
from hpctrain.world.agreement import agree, roll_call

if TYPE_CHECKING:
    import torch
    from mpi4py.MPI import Comm
    from torch import Tensor

__all__ = [
    "Backing",
    "PrivateView",
    "SharedBlock",
    "allocate",
    "page_slices",
    "places",
]

_PREFIX = "hpctrain-"
_KEEP_FREE_BYTES = 16 << 20
"""What is left for others in /dev/shm: MPI itself uses it."""
# The three highest bits of an entry of /proc/self/pagemap: present, swapped, of a file.
_KIND, _IN_MEMORY, _SWAPPED = 0xE0, 0x80, 0x40
_MOST_TRUSTED = 31
"""How many equal page fault counts in a row are conclusive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backing:
    """A folder whose files can be node-shared memory."""

    folder: Path
    free_bytes: int
    why: str
    """Why it was taken."""


class SharedBlock:
    """Bytes that the ranks of a node share. Made by `allocate`."""

    def __init__(
        self,
        descriptor: int,
        num_bytes: int,
        backing: Backing,
        private: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.num_bytes = num_bytes
        self.backing = backing
        self._descriptor = descriptor
        self._mapped = mmap.mmap(descriptor, num_bytes)
        self.views = [PrivateView(descriptor, start, size) for start, size in private]
        """The requested private views, in that order."""

    def tensor(self, dtype: torch.dtype, *, start: int = 0, num_elements: int) -> Tensor:
        """A flat tensor over the block, from byte `start` on; every rank sees every write."""
        return _tensor(self._mapped, dtype, start, num_elements)

    @property
    def descriptor(self) -> int:
        """The open file: other processes of this rank can open it through /proc."""
        return self._descriptor

    def close(self) -> None:
        """Give the file back; the memory goes when the last tensor over it does."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class PrivateView:
    """Shared memory as seen by one rank that may scribble on it.

    Reads see what other ranks write; the first write to a page gives this rank a copy of the page
    that no other rank sees, until `refresh` drops all such copies.
    """

    def __init__(self, descriptor: int, start: int, num_bytes: int) -> None:
        self._mapped = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, offset=start)
        self._pages = _Pages(self._mapped, num_bytes)

    def tensor(self, dtype: torch.dtype, *, start: int = 0, num_elements: int) -> Tensor:
        """A flat tensor over the view, from byte `start` on."""
        return _tensor(self._mapped, dtype, start, num_elements)

    def is_written(self) -> bool:
        """Whether this rank has pages of its own; True as well where the kernel does not tell.

        Version counters do not: writing to `tensor.data` or `tensor.numpy()` moves none.
        """
        return self._pages.any_own()

    def refresh(self) -> None:
        """Forget this rank's own writes: see again what is shared."""
        self._mapped.madvise(mmap.MADV_DONTNEED)


def allocate(
    comm: Comm,
    node: Comm,
    num_bytes: int,
    *,
    what: str,
    slices: Sequence[tuple[int, int]] | None = None,
    private: Sequence[tuple[int, int]] = (),
    backings: Sequence[Path] | None = None,
) -> SharedBlock:
    """Collective: reserve memory that the ranks of each node share.

    Args:
        comm: All ranks, so that all of them raise if one node has no space.
        node: This node's ranks.
        num_bytes: How much; the same on all ranks of a node.
        what: What it is for, for messages.
        slices: The bytes that each rank of the node uses most; None divides evenly.
        private: Private views to create as well: where each begins, a multiple of the page size,
            and its bytes.
        backings: Folders to look for space in; None: /dev/shm, then the temporary folder.

    Raises:
        CollectiveError: on all ranks; names the folder, its free space, the need and the cure.
    """
    # Whatever can fail on one rank alone, mapping included, comes before all agree.
    num_bytes = max(num_bytes, mmap.PAGESIZE)
    roll_call(comm, f"allocating {what}")
    found: tuple[Backing, str] | str | None = None
    descriptor = -1
    if node.Get_rank() == 0:
        found, descriptor = _create(num_bytes, backings, what)
    found = node.bcast(found, root=0)
    made: SharedBlock | str | None = None
    if isinstance(found, tuple):
        part = page_slices(num_bytes, node.Get_size(), slices)[node.Get_rank()]
        made = _attach(found, descriptor, part, num_bytes, private)
    else:
        made = found
    try:
        agree(comm, made if isinstance(made, str) else None, error=CollectiveError)
    except CollectiveError:
        if isinstance(made, SharedBlock):
            made.close()
        raise
    finally:
        if node.Get_rank() == 0 and isinstance(found, tuple):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(found[1])
    return cast(SharedBlock, made)


def places(
    num_bytes: int, backings: Sequence[Path] | None = None
) -> tuple[list[Backing], list[str]]:
    """Folders that have the space, best first, and in words why the others do not do."""
    good: list[Backing] = []
    refused: list[str] = []
    usual = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    for folder in usual if backings is None else backings:
        try:
            space = os.statvfs(folder)
        except OSError as error:
            refused.append(f"{folder} cannot be used ({error.strerror})")
            continue
        free = space.f_bavail * space.f_frsize
        if free < num_bytes + _KEEP_FREE_BYTES:
            total = space.f_blocks * space.f_frsize
            refused.append(f"{folder} has {format_bytes(free)} of {format_bytes(total)} free")
            continue
        why = f"in {folder}" + (f" since {'; '.join(refused)}" if refused else "")
        good.append(Backing(folder=folder, free_bytes=free, why=why))
    return good, refused


def page_slices(
    num_bytes: int, num_ranks: int, slices: Sequence[tuple[int, int]] | None = None
) -> list[tuple[int, int]]:
    """Which bytes each rank of a node reserves: whole pages, each of them once. Pure.

    Args:
        num_bytes: The whole block.
        num_ranks: The node's ranks.
        slices: What each uses most, in ascending order; None divides evenly.
    """
    if slices is None:
        ends = [num_bytes * (rank + 1) // num_ranks for rank in range(num_ranks)]
    else:
        ends = [stop for _, stop in slices]
    pages = [-(-end // mmap.PAGESIZE) * mmap.PAGESIZE for end in ends]
    pages[-1] = num_bytes
    bounds = [0, *(min(page, num_bytes) for page in pages)]
    return [(start, max(start, stop)) for start, stop in itertools.pairwise(bounds)]


def _create(
    num_bytes: int, backings: Sequence[Path] | None, what: str
) -> tuple[tuple[Backing, str] | str, int]:
    """The first rank's part: a new file of the full size in the first folder that takes it."""
    good, refused = places(num_bytes, backings)
    for backing in good:
        path = str(backing.folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            refused.append(f"{backing.folder} cannot be written to ({error.strerror})")
            continue
        try:
            os.ftruncate(descriptor, num_bytes)
        except OSError as error:  # a limit on the size of files
            os.close(descriptor)
            os.unlink(path)
            refused.append(f"{backing.folder} refused a file of that size ({error.strerror})")
            continue
        return (backing, path), descriptor
    return (
        f"no room for {format_bytes(num_bytes)} of node-shared memory ({what}): "
        f"{'; '.join(refused)}; make /dev/shm larger (docker --shm-size, podman --shm-size, or "
        "bind the host's /dev/shm), point TMPDIR at a larger folder, or run fewer ranks on a node"
    ), -1


def _attach(
    found: tuple[Backing, str],
    descriptor: int,
    part: tuple[int, int],
    num_bytes: int,
    private: Sequence[tuple[int, int]],
) -> SharedBlock | str:
    """Every rank's part: open the file, reserve its own slice, which places it, and map all.

    Returns:
        The block, or in words why there is none on this rank.
    """
    backing, path = found
    trying = "open"
    try:
        if descriptor < 0:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        trying = "reserve"
        start, stop = part
        if stop > start:
            _fallocate(descriptor, start, stop - start)
        trying = "map"
        return SharedBlock(descriptor, num_bytes, backing, private)
    except (OSError, MemoryError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        return _explain(trying, backing.folder, part[1] - part[0], num_bytes, error)


def _explain(
    trying: str, folder: Path, own_bytes: int, num_bytes: int, error: OSError | MemoryError
) -> str:
    """Why a rank could not use the file that the first rank of its node has made. Pure."""
    why = getattr(error, "strerror", None) or str(error)
    if trying == "open" and isinstance(error, FileNotFoundError):
        return (
            f"this rank does not see the file that another rank of its node created in {folder}: "
            f"the ranks do not share that folder (a container or a private {folder} for each of "
            "them?); start all ranks of a node in one container, or bind "
            f"the host's {folder} into each"
        )
    if trying == "open":
        return (
            f"this rank cannot open the file that another rank of its node created in {folder} "
            f"({why}); run all ranks as one user, with as many open files as they need (ulimit -n)"
        )
    if trying == "map":
        return (
            f"{format_bytes(num_bytes)} of node-shared memory in {folder} could not be mapped "
            f"({why}); allow this process more address space (ulimit -v, vm.max_map_count, "
            "vm.overcommit_memory), or use a smaller model"
        )
    return (
        f"{format_bytes(own_bytes)} of node-shared memory could not be reserved in {folder} "
        f"({why}); free some space there, or run fewer ranks on a node"
    )


def _fallocate(descriptor: int, start: int, length: int) -> None:
    try:
        os.posix_fallocate(descriptor, start, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        # A file system without reservation: writing is the only way to be sure of the space.
        zeros = bytes(min(length, 1 << 20))
        for offset in range(start, start + length, len(zeros)):
            os.pwrite(descriptor, zeros[: start + length - offset], offset)


class _Pages:
    """What the kernel reports about the pages of a private mapping of a file."""

    def __init__(self, mapped: mmap.mmap, num_bytes: int) -> None:
        import numpy as np
        import torch

        address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        first, last = address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)
        self._offset = 8 * first
        self._entries = np.zeros(8 * (last - first), dtype=np.uint8)
        self._kinds = self._entries[7::8]  # the highest byte: in memory, swapped, the file's own
        self._num_faults = -1
        """Page faults of this process when it was last found to have no private pages."""
        self._num_trusted = 0

    def any_own(self) -> bool:
        """Whether some are no longer the file's; True as well where the kernel does not tell.

        A page becomes private by a page fault. A process that has had none since the last check
        has none of its own still, and need not look; it does now and then all the same, for
        another process can write to its memory, too.
        """
        num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if num_faults == self._num_faults and self._num_trusted < _MOST_TRUSTED:
            self._num_trusted += 1
            return False
        table = _page_table(os.getpid())
        if table < 0 or os.preadv(table, [self._entries.data], self._offset) != len(self._entries):
            return True
        kinds = self._kinds & _KIND
        found = bool(((kinds == _IN_MEMORY) | (kinds == _SWAPPED)).any())
        self._num_faults, self._num_trusted = (-1 if found else num_faults), 0
        return found


@functools.cache
def _page_table(_process: int) -> int:
    """The kernel's table of this process's pages, opened once; -1 where it is closed to us."""
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _tensor(mapped: mmap.mmap, dtype: torch.dtype, start: int, num_elements: int) -> Tensor:
    import torch

    if not num_elements:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=num_elements, offset=start)
