"""A thread that writes while training goes on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable

from hpctrain.errors import CheckpointError

__all__ = ["Background", "Errand"]

_NICENESS = 10
"""Training goes first: the writer takes what is left, and a tenth of a core where nothing is."""


class Errand:
    """Something that the thread does once, and how it went."""

    def __init__(self, work: Callable[[], None], what: str) -> None:
        self.what = what
        self.started = time.monotonic()
        self._work = work
        self._ended = threading.Event()
        self._trouble: str | None = None

    def run(self) -> None:
        """Do it; whatever goes wrong is kept for whoever asks."""
        try:
            self._work()
        except CheckpointError as error:
            self._trouble = str(error)
        except Exception as error:  # nobody sees what is raised in a thread
            self._trouble = f"{self.what} failed: {type(error).__name__}: {error}"
        self._ended.set()

    @property
    def is_running(self) -> bool:
        """Whether it has not come to its end yet."""
        return not self._ended.is_set()

    def trouble(self, timeout_s: float) -> str | None:
        """What has gone wrong so far, or None; no end after `timeout_s` is trouble, too."""
        if self._ended.is_set():
            return self._trouble
        elapsed = time.monotonic() - self.started
        return self._too_slow(elapsed, timeout_s) if elapsed > timeout_s else None

    def outcome(self, timeout_s: float) -> str | None:
        """Wait for the end, until `timeout_s` after the beginning; what went wrong, or None."""
        left = self.started + timeout_s - time.monotonic()
        if self._ended.wait(max(0.0, left)):
            return self._trouble
        return self._too_slow(time.monotonic() - self.started, timeout_s)

    def _too_slow(self, elapsed_s: float, timeout_s: float) -> str:
        return (
            f"{self.what} has been going on for {elapsed_s:.0f} s and {timeout_s:g} s are allowed; "
            "the disk is too slow, or does not answer"
        )


class Background:
    """One thread, started at the first errand, that runs one errand after the other."""

    def __init__(self, cpus: Iterable[int] = (), *, is_polite: bool = True) -> None:
        """Make it.

        Args:
            cpus: Cores it may use; none leaves it those of the process.
            is_polite: Whether training goes first; not where training waits for it.
        """
        self._cpus = frozenset(cpus)
        self._is_polite = is_polite
        self._todo: list[Errand | None] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, errand: Errand) -> None:
        """Hand an errand over; returns at once."""
        with self._changed:
            self._todo.append(errand)
            self._changed.notify()
        if self._thread is None:
            # A thread that hangs in a dead file system must not keep the process from ending.
            self._thread = threading.Thread(
                target=self._serve, name="hpctrain-checkpoint", daemon=True
            )
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread once it has nothing to do."""
        if self._thread is None:
            return
        with self._changed:
            self._todo.append(None)
            self._changed.notify()
        self._thread.join(timeout_s)
        self._thread = None

    def _serve(self) -> None:
        self._step_back()
        while True:
            with self._changed:
                while not self._todo:
                    self._changed.wait()
                errand = self._todo.pop(0)
            if errand is None:
                return
            errand.run()

    def _step_back(self) -> None:
        """Leave the cores to training, as far as the system lets a thread choose for itself."""
        if self._is_polite:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        if self._cpus:
            with contextlib.suppress(OSError, AttributeError):
                os.sched_setaffinity(threading.get_native_id(), self._cpus)
