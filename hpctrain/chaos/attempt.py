"""One launch of a training that something will happen to, and what it must not leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import uuid4

import psutil

from hpctrain.doctor import find_leftovers
from hpctrain.faults import CHAOS_VARIABLE, Injection

__all__ = ["Attempt"]

_TOKEN = "HPCTRAIN_CHAOS_ATTEMPT"
"""Set in the environment of every process of an attempt, to find them."""
_POLL_S = 0.02
_SILENCE_S = 10.0


class Attempt:
    """A running command of hpctrain, with its output in a file.

    Args:
        words: What follows `hpctrain`.
        output: The file of its output.
        injection: The fault to inject.
        search: Folders that Python looks for modules in first.
    """

    def __init__(
        self,
        words: Sequence[str],
        output: Path,
        *,
        injection: Injection | None = None,
        search: Sequence[Path] = (),
    ) -> None:
        self.output = output
        self._token = uuid4().hex
        self._segments = _segments()
        paths = [*map(str, search), os.environ.get("PYTHONPATH", "")]
        environ = {
            **os.environ,
            _TOKEN: self._token,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            CHAOS_VARIABLE: "" if injection is None else injection.text(),
        }
        self.began = time.time()
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hpctrain", *words],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self.output.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether the launcher has not ended."""
        return self.process.poll() is None

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something, at most until the launcher ends; whether it happened."""
        end = time.monotonic() + timeout_s
        while not (came := is_so()) and self.is_running and time.monotonic() < end:
            time.sleep(_POLL_S)
        return came

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, as a shell says it; None: it did not end, and was ended."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            return None
        return code if code >= 0 else 128 - code

    def send(self, name: str) -> None:
        """Send the launcher a signal."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.Signals[name])

    def processes(self) -> list[psutil.Process]:
        """All processes of this attempt that are alive, the launcher included."""
        mark = f"{_TOKEN}={self._token}".encode()
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):  # ended, or another user's
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(psutil.Process(pid))
        return found

    def leftovers(self) -> list[str]:
        """Processes and shared memory of hpctrain that outlive the end by ten seconds."""
        end = time.monotonic() + _SILENCE_S
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.1)
        self.end()
        return left

    def _left(self) -> list[str]:
        alive = [f"process {one.pid}" for one in self.processes()]
        return alive + sorted(_segments() - self._segments)

    def end(self) -> None:
        """Kill whatever is left of it."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=10)


def _segments() -> set[str]:
    """Shared memory of hpctrain that is not in use."""
    found = find_leftovers(youngest_s=0.0)
    return {str(one.path) for one in found if one.owner == "hpctrain"}
