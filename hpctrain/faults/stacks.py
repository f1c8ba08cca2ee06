"""Python stacks of this process, for people who look for the line that hangs."""

from __future__ import annotations

import sys
import threading
import traceback

from hpctrain.faults.sites import is_users

__all__ = ["THREAD_PREFIX", "format_stacks", "users_place"]

THREAD_PREFIX = "hpctrain-watchdog"
"""How the watchdog's own threads are called; they are left out."""


def users_place() -> str:
    """The innermost line of the user's own code in the main thread.

    It reads no file, so that it answers even while a file system hangs.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
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
    frames = sys._current_frames()
    parts = []
    for ident in sorted(frames, key=lambda ident: (ident != main, ident)):
        name = names.get(ident, "a thread that Python did not start")
        if not name.startswith(THREAD_PREFIX):
            lines = _below_launcher(traceback.extract_stack(frames[ident])).format()
            parts.append(f"{name}, most recent call last:\n{''.join(lines).rstrip()}")
    return "\n".join(parts)
