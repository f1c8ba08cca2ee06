"""A file lock with a bounded wait that can say who holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain import log
from hpctrain.errors import InstallError
from hpctrain.install.process import keep_open

__all__ = ["held"]

_POLL_S = 0.2
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


@contextmanager
def held(path: Path, *, what: str, wait_s: float) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; it goes when the process does.

    Commands started in the block hold it as well, so it outlives a killed process until they end.

    Args:
        path: The lock file, made if missing and never removed (removing one is a race).
        what: What is being done under the lock, for the message to others.
        wait_s: How long to wait for another holder before giving up.

    Raises:
        InstallError: someone else held it for longer than `wait_s`; the message names them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        _acquire(file.fileno(), path, what=what, wait_s=wait_s)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        with keep_open(file.fileno()):
            yield
        file.truncate(0)


def _acquire(fd: int, path: Path, *, what: str, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS_HERE:
                log.warn(f"the file system of {path.parent} has no locks; continuing without one")
                return
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise
        else:
            return
        holder = path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
        if time.monotonic() >= deadline:
            raise InstallError(
                f"cannot start: {what}. {holder} has been holding {path} for more than "
                f"{wait_s:.0f} s; let it finish, or kill that process, then try again"
            )
        if not told:
            log.notice(
                f"waiting up to {wait_s:.0f} s for {holder}, which is already doing it: {what}"
            )
            told = True
        time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
