"""Where and when something stands in a trace. Pure.

Processes and threads count from 1: Perfetto takes process 0 and thread 0 for the kernel's idle task
and draws them otherwise.
"""

from __future__ import annotations

from typing import Any

__all__ = ["STEPS", "Record", "microseconds", "process_of", "span", "thread_of"]

STEPS = 1
"""The thread of the trace on which steps are drawn; those of the rank follow."""

Record = dict[str, Any]


def process_of(rank: int) -> int:
    """The process that a rank is in the trace."""
    return 1 + rank


def thread_of(thread: int) -> int:
    """The thread of the trace for a rank's own, which count from 0."""
    return 1 + STEPS + thread


def microseconds(time_ns: float, origin: float) -> float:
    """A time as the trace has it, exact to a nanosecond."""
    return round((time_ns - origin) / 1000, 3)


def span(begin_ns: float, end_ns: float, origin: float) -> Record:
    """Rounded so that what lies inside another still does."""
    begin, end = microseconds(begin_ns, origin), microseconds(end_ns, origin)
    return {"ts": begin, "dur": round(end - begin, 3)}
