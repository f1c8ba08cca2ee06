"""Running a long command to a log file: watched line by line, bounded, ended with its children."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

from hpctrain.programs import end_group

__all__ = ["TooLongError", "interruptible", "keep_open", "kept_open", "run_logged"]

_KEPT_OPEN: ContextVar[tuple[int, ...]] = ContextVar("kept_open", default=())


class TooLongError(Exception):
    """A command ran past its time limit and was ended."""


def run_logged(
    command: Sequence[str],
    *,
    log_file: Path,
    env: Mapping[str, str],
    limit_s: float,
    cwd: Path | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> int:
    """Run a command, append its output to `log_file`, and return its exit code.

    The command gets a process group of its own, which is ended with it on a time limit, an
    interrupt or a termination signal.

    Raises:
        TooLongError: it did not end within `limit_s`.
    """
    with log_file.open("a", encoding="utf-8", errors="replace") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            pass_fds=kept_open(),
        )
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            end_group(process.pid)

        timer = threading.Timer(limit_s, expire)
        timer.daemon = True
        timer.start()
        try:
            for line in process.stdout or ():
                out.write(line)
                out.flush()
                on_line(line)
            code = process.wait()
        except BaseException:
            end_group(process.pid)
            process.wait()
            raise
        finally:
            timer.cancel()
            timer.join()
            if process.stdout:
                process.stdout.close()
    if expired.is_set():
        raise TooLongError(f"ended after {limit_s:.0f} s")
    return code


@contextmanager
def keep_open(fd: int) -> Iterator[None]:
    """Hand an open file to every command that the block starts.

    A lock then holds until the commands are gone too, even if this process is killed: whatever
    comes next does not meet them at work.
    """
    token = _KEPT_OPEN.set((*_KEPT_OPEN.get(), fd))
    try:
        yield
    finally:
        _KEPT_OPEN.reset(token)


def kept_open() -> tuple[int, ...]:
    """The files that commands started here are to inherit."""
    return _KEPT_OPEN.get()


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn a termination signal into an exception, so that what was begun is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {sig: signal.signal(sig, leave) for sig in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
