"""One thread that runs calls in the order they came: how a blocking call becomes asynchronous."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

__all__ = ["Job", "Worker"]

_STOP_S = 30.0


class Job:
    """A call that the worker runs."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the call and keep what it raised for whoever waits."""
        try:
            self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the call has ended; raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Worker:
    """A thread that is started by the first asynchronous call, and not before.

    Args:
        name: The thread's.
        device: What the thread computes on, so that a library that looks at the current device sees
            the right one.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Job | None = None

    def submit(self, call: Callable[[], None]) -> Job:
        """Queue a call and return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._last = job = Job(call)
        self._jobs.put(job)
        return job

    def run(self, call: Callable[[], None]) -> None:
        """Run a call behind those that are pending; on the caller's thread when there are none."""
        if self._last is None or self._last.done:
            call()
        else:
            self.submit(call).wait()

    def stop(self) -> None:
        """Let the pending calls end, then the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_STOP_S)
            self._thread = None

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (job := self._jobs.get()) is not None:
            job.run()
