"""How long a rank waits for the others, and what monitors the wait."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

__all__ = ["DEFAULT_S", "END_OF_BLOCK", "Watch", "Watchdog", "Watching", "takes_timeout"]

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_S = 600.0
"""Default time that ranks wait for a missing one."""

END_OF_BLOCK = "the end of `with hpc.init()`"
"""What a rank is said to be in that has left the user's code."""

_LINGERS_S = 2.0

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_UNNAMED = tuple(
    os.path.join(_PACKAGE, *parts)
    for parts in (
        ("cli", ""),
        ("launch", ""),
        ("__main__.py",),
        ("train", "entry.py"),
        ("world", "watched.py"),
        ("world", "watching.py"),
        ("world", "agreement.py"),
    )
)
"""Files whose functions mean nothing to a user: they start scripts, or wait for others."""


class Watch(Protocol):
    """Monitors the collectives of one group of ranks."""

    def enter(self, call: str, timeout_s: float | None = None) -> None:
        """A collective begins; `timeout_s` is how long it may last, None: as long as any."""

    def leave(self) -> None:
        """It has ended."""


class Watchdog(Watch, Protocol):
    """Monitors the collectives of all ranks, and work that delays this one."""

    def patience(
        self, seconds: float, *, lingers_s: float | None = None
    ) -> AbstractContextManager[None]:
        """A block in which calls may last at least so long, on all ranks."""


class Watching:
    """Who watches over a world's communicators, and how long their collectives may last.

    Args:
        timeout_s: For calls without their own timeout.
    """

    def __init__(self, timeout_s: float = DEFAULT_S) -> None:
        self.timeout_s = timeout_s
        self.watchdog: Watchdog | None = None
        """Over all ranks; None: no watchdog."""
        self.watches: dict[str, Watch] = {}
        """By communicator: `comm` (the watchdog itself), `node`, `cross`."""
        self._here = threading.local()

    @contextmanager
    def allow(self, timeout_s: float) -> Iterator[None]:
        """In this block calls of this thread may last so long; the outermost block decides."""
        if getattr(self._here, "timeout_s", None) is not None:
            yield
            return
        self._here.timeout_s = timeout_s
        try:
            yield
        finally:
            self._here.timeout_s = None

    @contextmanager
    def called(self, name: str) -> Iterator[None]:
        """In this block calls of this thread go by what the user has called, or has come to.

        For code that torch or the end of a block calls, where no public function is on the stack.
        """
        before, self._here.caller = getattr(self._here, "caller", None), name
        try:
            yield
        finally:
            self._here.caller = before

    @contextmanager
    def announce(
        self,
        call: str,
        *,
        timeout_s: float | None = None,
        at_least_s: float = 0.0,
        label: str = "comm",
    ) -> Iterator[None]:
        """A block that waits for other ranks; the same on all of them.

        Args:
            call: What it does, in a word; the public function that it serves is put before it.
            timeout_s: How long it may take, where no `allow` says otherwise.
            at_least_s: What it may take in any case, where it does more than wait.
            label: Which communicator: `comm`, `node` or `cross`.
        """
        watch = self.watches.get(label)
        if watch is None:
            yield
            return
        caller: str | None = getattr(self._here, "caller", None)
        name = _name(call) if caller is None else f"{caller}: {call}"
        watch.enter(name, max(self.limit_s(timeout_s), at_least_s))
        try:
            yield
        finally:
            watch.leave()

    def limit_s(self, timeout_s: float | None = None) -> float:
        """How long a call may last now."""
        caller: float | None = getattr(self._here, "timeout_s", None)
        return next(s for s in (caller, timeout_s, self.timeout_s) if s is not None)

    def patience(self, seconds: float) -> AbstractContextManager[None]:
        """A block of work that may keep this rank away so long: those who wait for it, wait on."""
        watch = self.watchdog
        return nullcontext() if watch is None else watch.patience(seconds, lingers_s=_LINGERS_S)


def takes_timeout(function: Callable[P, T]) -> Callable[P, T]:
    """Let a collective's `timeout_s` hold for all that it waits for; its first argument: a world.

    A time that is not positive is left to the function to refuse.
    """
    default = inspect.signature(function).parameters["timeout_s"].default

    @functools.wraps(function)
    def limited(*args: P.args, **options: P.kwargs) -> T:
        comms = getattr(args[0] if args else options.get("world"), "comms", None)
        timeout_s: Any = options.get("timeout_s", default)
        if comms is None or not isinstance(timeout_s, int | float) or not timeout_s > 0:
            return function(*args, **options)
        with comms.watching.allow(float(timeout_s)):
            return function(*args, **options)

    return limited


def _name(call: str) -> str:
    """The public function that is waiting, and in what."""
    frame: FrameType | None = sys._getframe(1)
    outermost: CodeType | None = None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            if not path.startswith(_UNNAMED):
                outermost = frame.f_code
        elif outermost is not None:
            break
        frame = frame.f_back
    if outermost is None:
        return call
    where = outermost.co_qualname.removesuffix(".__init__")
    return call if call == where else f"{where}: {call}"
