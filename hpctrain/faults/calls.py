"""What this rank is doing: its collectives in order, and where in the user's code they were made.

`enter` and `leave` are on the path of every collective, so they only write plain attributes: no
locks, and nothing is formatted. Other threads read snapshots.
"""

from __future__ import annotations

import gc
import itertools
import operator
import os
import sys
import sysconfig
import threading
import traceback
from _thread import get_ident
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from sys import _getframe
from time import monotonic
from types import CodeType, FrameType
from typing import cast

__all__ = [
    "THREAD_PREFIX",
    "Call",
    "CallHistory",
    "CallLog",
    "CallState",
    "Site",
    "current_frames",
    "describe_site",
    "format_stacks",
    "is_users",
    "quote",
    "users_place",
    "users_site",
]

THREAD_PREFIX = "hpctrain-watchdog"
"""Names of the watchdog's own threads, which are left out."""

Site = tuple[CodeType, int]
"""A function and the place in its bytecode. Frames are not kept: they hold the user's tensors."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    {
        os.path.abspath(path) + os.sep
        for name, path in sysconfig.get_paths().items()
        if name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_known: dict[str, bool] = {}
_MOST_NAMES = 1024

_RING = 64
_MASK = _RING - 1  # 64 is a power of two
_Entry = tuple[int, str, float, Site | None, float | None]
"""Number, name, when it began, where, and how long it may last."""


def quote(name: str, limit: int = 400) -> str:
    """Quote a call's name for a message; names of many parameters are cut."""
    return f"'{name}'" if len(name) <= limit else f"'{name[:limit]}...'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One collective of a call log: its number, its name, and the seconds in it or since it."""

    number: int
    name: str
    seconds: float
    timeout_s: float = 0.0
    """This rank's timeout for it: 0 if it is another rank's call."""

    def __str__(self) -> str:
        return f"{quote(self.name)} #{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallState:
    """Which calls of a log a rank has entered, is in and has left."""

    entered: int
    """The number of the last call it entered."""
    open: tuple[Call, ...] = ()
    """The calls it is in, outer ones first; one run of them per thread."""
    innermost: tuple[int, ...] = ()
    """The numbers of the innermost open calls, one per thread."""
    ended: Call | None = None
    """The call that ended last."""
    recent: Mapping[int, str] = field(default_factory=dict)
    """Names of the last calls by number."""
    num_threads: int = 1
    """How many threads have made calls in this log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallHistory:
    """A rank's last calls: by number the name, and where in the user's code it was made."""

    names: Mapping[int, str]
    places: Mapping[int, str]

    @classmethod
    def read(cls, told: Mapping[str, Mapping[str, str]]) -> CallHistory:
        """A history as received over the channel, where keys are texts."""
        return cls(
            names={int(number): name for number, name in told["names"].items()},
            places={int(number): place for number, place in told["places"].items()},
        )


class CallLog:
    """The calls of one group of ranks, which all make the same calls in the same order.

    Several threads may call: each has a stack of its own, so calls may also be nested. A call is
    left by the thread that entered it. Numbers count all calls of the log.

    Args:
        ranks: Who makes these calls.
        key: The name of the log, the same on all of them.
        timeout_s: How long a call may last that is given no time of its own.
        may_be_late: Whether a rank that is busy elsewhere may come as late as it likes; only one
            whose process is stopped or has ended is missing then.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        key: str,
        *,
        timeout_s: float = 600.0,
        may_be_late: bool = False,
    ) -> None:
        self.ranks = ranks
        self.key = key
        self.timeout_s = timeout_s
        self.may_be_late = may_be_late
        self._numbers = itertools.count(1)
        self._stacks: dict[int, list[_Entry]] = {}
        self._ring: list[_Entry] = [(0, "", 0.0, None, None)] * _RING
        self._ended: tuple[_Entry, float] | None = None
        self._depths: dict[str, int] = {}
        self._home = get_ident()
        self.waited_s = 0.0
        """Seconds that the thread that made this log has spent in its calls."""

    def enter(self, call: str, timeout_s: float | None = None) -> None:
        """A collective begins; `call` names it and is the same on all ranks of the log.

        Args:
            call: Its name.
            timeout_s: How long it may last; None: as long as the call that contains it, or else any
                of this log.
        """
        number = next(self._numbers)
        entry = (number, call, monotonic(), users_site(call, self._depths), timeout_s)
        self._ring[number & _MASK] = entry
        try:
            self._stacks[get_ident()].append(entry)
        except KeyError:
            self._stacks[get_ident()] = [entry]

    def leave(self) -> None:
        """The collective that this thread entered last has ended.

        Raises:
            RuntimeError: this thread has not entered one.
        """
        thread = get_ident()
        try:
            stack = self._stacks[thread]
            entry = stack.pop()
        except (KeyError, IndexError):
            raise RuntimeError(
                "leave() without enter(): the thread that enters a collective must leave it"
            ) from None
        now = monotonic()
        self._ended = (entry, now)
        if not stack and thread == self._home:
            self.waited_s += now - entry[2]

    def pending(self, now: float) -> list[Call]:
        """The innermost open call of every thread, and how long nothing has moved in it."""
        ended = self._ended
        calls = []
        for stack in self._open_stacks():
            number, name, since, _, _ = stack[-1]
            # A call that contains others moves as long as they do.
            if ended is not None and ended[0][0] > number:
                since = max(since, ended[1])
            calls.append(
                Call(
                    number=number,
                    name=name,
                    seconds=now - since,
                    timeout_s=self._limit_s(stack),
                )
            )
        return calls

    def _limit_s(self, stack: Sequence[_Entry]) -> float:
        """How long the innermost of nested calls may last."""
        return next((e[4] for e in reversed(stack) if e[4] is not None), self.timeout_s)

    def state(self) -> CallState:
        """What this rank has entered, is in and has left."""
        now = monotonic()
        ended = self._ended
        # The stacks before the ring: a call that is open is then always known by name, too.
        stacks = self._open_stacks()
        recent = {number: name for number, name, *_ in list(self._ring) if number}
        return CallState(
            entered=max(recent, default=0),
            open=tuple(
                Call(number=number, name=name, seconds=now - since)
                for stack in stacks
                for number, name, since, *_ in stack
            ),
            innermost=tuple(stack[-1][0] for stack in stacks),
            ended=None
            if ended is None
            else Call(number=ended[0][0], name=ended[0][1], seconds=now - ended[1]),
            recent=recent,
            num_threads=len(self._stacks),
        )

    def history(self) -> CallHistory:
        """This rank's last calls, and where they were made."""
        entries = sorted((entry for entry in list(self._ring) if entry[0]), key=itemgetter(0))
        return CallHistory(
            names={number: name for number, name, *_ in entries},
            places={number: describe_site(site) for number, _, _, site, _ in entries},
        )

    def _open_stacks(self) -> list[tuple[_Entry, ...]]:
        """Copies of the stacks that are not empty; those of threads that died are dropped."""
        # Not the frames themselves: this one's would keep itself, and all others' variables, alive.
        alive = frozenset(current_frames())
        copies = [(ident, tuple(stack)) for ident, stack in list(self._stacks.items())]
        return [stack for ident, stack in copies if stack and ident in alive]


def current_frames() -> dict[int, FrameType]:
    """The frame of each thread that runs Python, by thread.

    Python 3.11 may collect garbage inside `sys._current_frames`, which then waits forever for the
    lock it holds: all threads stop (python/cpython#106883). Three calls by `map` are one step for
    the other threads: none of them sees the collector disabled.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()
    try:
        _, frames, _ = map(operator.call, (gc.disable, sys._current_frames, gc.enable))
    except BaseException:
        gc.enable()
        raise
    return cast("dict[int, FrameType]", frames)


def is_users(path: str) -> bool:
    """Whether a source file is the user's own: not hpctrain's, Python's or a library's."""
    return not path.startswith(("<", _OURS, *_LIBRARIES))


def users_site(call: str, depths: dict[str, int]) -> Site | None:
    """The innermost place of the user's code behind a call; None where there is none.

    On the path of every collective: it reads no file, looks no line number up, and goes straight to
    the frame where the call of this name had it before. Walking there costs far more.

    Args:
        call: The name of the call.
        depths: Where calls had it before, by name; kept from call to call.
    """
    depth = depths.get(call)
    if depth is not None:
        try:
            inner, frame = _getframe(depth - 1), _getframe(depth)
        except ValueError:
            pass  # the stack is not so deep this time
        else:
            code = frame.f_code
            if _known.get(code.co_filename) and not _known.get(inner.f_code.co_filename):
                return code, frame.f_lasti
    return _walk(call, depths)


def _walk(call: str, depths: dict[str, int]) -> Site | None:
    depth = 2
    frame: FrameType | None = _getframe(depth + 1)
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if path not in _known:
            _known[path] = is_users(path)
        if _known[path]:
            if len(depths) > _MOST_NAMES:
                depths.clear()
            depths[call] = depth
            return code, frame.f_lasti
        frame = frame.f_back
        depth += 1
    return None


def describe_site(site: Site | None) -> str:
    """`FILE:LINE in FUNCTION`, or nothing."""
    if site is None:
        return ""
    code, offset = site
    line = next(
        (number for start, end, number in code.co_lines() if start <= offset < end),
        code.co_firstlineno,
    )
    return f"{code.co_filename}:{line} in {code.co_qualname}"


def users_place() -> str:
    """The innermost line of the user's own code in the main thread.

    It reads no file, so that it answers even while a file system hangs.
    """
    frame = current_frames().get(threading.main_thread().ident or 0)
    found = frame
    while found is not None and not is_users(found.f_code.co_filename):
        found = found.f_back
    found = found or frame
    if found is None:
        return ""
    code = found.f_code
    return f"{code.co_filename}:{found.f_lineno} in {code.co_qualname}"


def _below_launcher(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Drop the frames at the top that run the user's script and say nothing about it."""
    first = next((i for i, frame in enumerate(stack) if is_users(frame.filename)), 0)
    return traceback.StackSummary.from_list(stack[first:])


def format_stacks() -> str:
    """The stacks of all threads but the watchdog's, the main thread first."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = current_frames()
    parts = []
    for ident in sorted(frames, key=lambda ident: (ident != main, ident)):
        name = names.get(ident, "a thread that Python did not start")
        if not name.startswith(THREAD_PREFIX):
            lines = _below_launcher(traceback.extract_stack(frames[ident])).format()
            parts.append(f"{name}, most recent call last:\n{''.join(lines).rstrip()}")
    return "\n".join(parts)
