"""Run a command with a time limit, and end all of its process group when the limit passes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["ClusterError", "checked", "end_group", "run_command"]

GRACE_S = 3.0
SHOWN_CHARACTERS = 6000


class ClusterError(RuntimeError):
    """A command failed or was too slow, or the test cluster could not be made."""


def end_group(process: subprocess.Popen[str], grace_s: float = GRACE_S) -> None:
    """Ends a process started in its own session, with its group: first asked, then killed."""
    for sign, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)


def run_command(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns its output.

    Args:
        argv: The command.
        timeout_s: When it is over, the command's process group is ended and an error raised.
        env: The whole environment; this process's when left out.
        stdin: Text for its standard input, which is empty when left out.
        check: Raise when the exit status is not 0.

    Raises:
        ClusterError: It took too long, or failed and `check` is on; with what it printed.
    """
    process = subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(stdin, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_group(process)
        stdout, stderr = _rest(process)
        what = f"still ran after {timeout_s:g} s"
        raise ClusterError(_report(argv, what, stdout, stderr)) from None
    except BaseException:
        end_group(process)
        _rest(process)
        raise
    result = subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)
    return checked(result) if check else result


def checked(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Returns the result, or raises ClusterError with its output when the exit status is not 0."""
    if result.returncode == 0:
        return result
    what = f"exited with {result.returncode}"
    raise ClusterError(_report(result.args, what, result.stdout, result.stderr))


def _rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What an ended process printed; nothing when a stray child still holds its pipes."""
    try:
        return process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        return "", "(output lost: a child that left the process group holds the pipes)"


def _report(argv: Sequence[str], what: str, stdout: str, stderr: str) -> str:
    out, err = stdout[-SHOWN_CHARACTERS:], stderr[-SHOWN_CHARACTERS:]
    return f"{' '.join(argv)}\n{what}\n--- stdout\n{out}\n--- stderr\n{err}"
