"""What goes wrong on one rank ends all ranks, with that rank's traceback, once."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import NoReturn

from hpctrain.errors import LaunchError, TimedOutError
from hpctrain.exit_codes import INTERRUPTED, TIMED_OUT
from hpctrain.world.launcher import Launch
from hpctrain.world.notes import note_exit

__all__ = [
    "AgreedExit",
    "abort",
    "before_abort",
    "end_all_ranks",
    "exit_code_of",
    "install_hook",
    "leave",
    "leave_together",
    "prepare_abort",
    "remark_on_waiting",
    "report_exit",
    "report_hard_exits",
    "whereabouts",
]

# When every rank fails with the same error, the lowest one reports: it gets this head start.
_HEAD_START_S = 0.25
_LONGEST_HEAD_START_S = 1.5

# When a rank aborts, launchers may throw away what they have not read of its output yet.
_TO_BE_READ_S = 0.2

# A rank that leaves by sys.exit(0) waits for the others; most of the time they come at once.
_REMARK_AFTER_S = 8.0

# For those who have said why already; `report_hard_exits` makes the user's own calls speak.
leave = os._exit


class AgreedExit(SystemExit):
    """All ranks have agreed to exit with this code: no rank waits, and no work is lost."""


def exit_code_of(error: BaseException) -> int:
    """Translate an exception into the exit code that Python would end with."""
    if isinstance(error, SystemExit):
        return _split_code(error)[0]
    if isinstance(error, TimedOutError):
        return TIMED_OUT
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _split_code(error: SystemExit) -> tuple[int, str | None]:
    """Split `sys.exit(value)` into an exit code and the text Python would print."""
    if error.code is None:
        return 0, None
    return (error.code, None) if isinstance(error.code, int) else (1, str(error.code))


def report_exit(launch: Launch, code: int, cause: str) -> None:
    """Tell `hpctrain run`, where it started us, and the job script how this rank ends."""
    note_exit(launch, code)
    if launch.control_fd is None:
        return
    line = json.dumps({"exit": code, "cause": cause}) + "\n"
    try:
        os.write(launch.control_fd, line.encode())
    except OSError:
        return  # the starter is gone


def leave_together(launch: Launch, error: AgreedExit) -> None:
    """Report that this rank exits as agreed, before the launcher blames a rank."""
    _flush()
    report_exit(launch, exit_code_of(error), "as all ranks agreed")


@contextlib.contextmanager
def remark_on_waiting(launch: Launch, after_s: float = _REMARK_AFTER_S) -> Iterator[None]:
    """Say that this rank called sys.exit(0), if the others do not leave with it.

    They may have something to finish, so this ends nothing; if they wait for this rank in a
    collective, the watchdog will, and here is why.
    """
    rank, size = whereabouts(launch)
    text = (
        f"hpctrain: rank {rank} of {size} on {socket.gethostname()} called sys.exit(0) and waits "
        "for the others to end; if they continue training, let all ranks exit at the same step\n"
    )
    timer = threading.Timer(after_s, lambda: os.write(2, text.encode()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def report_hard_exits(launch: Launch) -> None:
    """Let `os._exit` of this process report itself: launchers may blame a rank that they ended."""
    owner = os.getpid()

    def report_and_exit(code: int) -> NoReturn:
        if os.getpid() == owner:  # a forked child leaves this way as a matter of course
            cause = f"os._exit({code})"
            if code != 0:
                rank, size = whereabouts(launch)
                where = f"rank {rank} of {size} on {socket.gethostname()}"
                os.write(2, f"hpctrain: {where} called {cause}; ending all ranks\n".encode())
            report_exit(launch, code, cause)
        leave(code)

    os._exit = report_and_exit  # type: ignore[assignment]


def whereabouts(launch: Launch) -> tuple[int, int]:
    """This rank and the number of ranks: MPI's, or the launcher's while there is no MPI."""
    MPI = _running_mpi()
    if MPI is not None and (launch.row is None or MPI.COMM_WORLD.Get_size() > 1):
        return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    return launch.rank, launch.size


before_abort: list[Callable[[], None]] = []
"""Called before this rank aborts all others, so that its exit is not reported as a death."""


def prepare_abort() -> None:
    """Call what is in `before_abort`; a failure in it does not stop the abort."""
    for call in list(before_abort):
        with contextlib.suppress(Exception):
            call()


def end_all_ranks(launch: Launch, error: BaseException) -> NoReturn:
    """Print this rank's traceback and end every rank of the job with its exit code. Never returns.

    Not collective: one rank is enough. Ranks that fail with the same error at the same moment take
    turns, so that one traceback is printed and not a thousand.
    """
    code = exit_code_of(error)
    rank, size = whereabouts(launch)
    time.sleep(min(rank * _HEAD_START_S, _LONGEST_HEAD_START_S))
    where = f"rank {rank} of {size} on {socket.gethostname()}"
    if isinstance(error, SystemExit):
        text = _split_code(error)[1]
        cause = f"sys.exit({error.code!r})"
        body = f"{where} called {cause}; ending all ranks" + (f"\n{text}" if text else "")
    elif isinstance(error, LaunchError):
        cause = str(error)
        body = f"{where} cannot start\nLaunchError: {error}"
    else:
        cause = f"{type(error).__name__}: {error}"
        lines = traceback.format_exception(type(error), error, _users_frames(error.__traceback__))
        body = f"{where} failed; ending all ranks\n" + "".join(lines).rstrip()
    _flush()
    sys.stderr.write(f"hpctrain: {body}\n")
    _flush()
    report_exit(launch, code, cause)
    prepare_abort()
    abort(code)


def _users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames at the top that belong to the launcher and not to the user's script."""
    skipped = trace
    while skipped is not None:
        path = skipped.tb_frame.f_code.co_filename
        if "runpy" not in path and os.path.join("hpctrain", "launch", "") not in path:
            return skipped
        skipped = skipped.tb_next
    return trace


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # a closed stream has nothing left to lose


def abort(code: int) -> NoReturn:
    """End all ranks through MPI where it runs, or this process alone, after the last words."""
    MPI = _running_mpi()
    # A failure must not look like success: 0 would tell the launcher that all is well.
    if MPI is not None:
        time.sleep(_TO_BE_READ_S)
        MPI.COMM_WORLD.Abort(code or 1)
    leave(code or 1)


def _running_mpi() -> ModuleType | None:
    """mpi4py.MPI while MPI is up; it is never loaded from here."""
    MPI = sys.modules.get("mpi4py.MPI")
    up = MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()
    return MPI if up else None


def install_hook(launch: Launch) -> Callable[[], None]:
    """Let uncaught exceptions end all ranks; returns what puts the previous hook back.

    A process that is alone keeps Python's own ways.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if whereabouts(launch)[1] > 1:
            end_all_ranks(launch, error.with_traceback(trace))
        previous(kind, error, trace)

    sys.excepthook = hook

    def restore() -> None:
        if sys.excepthook is hook:
            sys.excepthook = previous

    return restore
