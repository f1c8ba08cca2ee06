"""Waiting by looking again and again: bounded, and without keeping a core from those who work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hpctrain.errors import TimedOutError

if TYPE_CHECKING:
    from mpi4py.MPI import Request

__all__ = ["finish", "poll"]

_SPIN_S = 0.0005
_SHORTEST_NAP_S = 2e-5
_LONGEST_NAP_S = 0.001


def poll(
    is_done: Callable[[], bool],
    *,
    timeout_s: float,
    spin_s: float = _SPIN_S,
    longest_nap_s: float = _LONGEST_NAP_S,
) -> bool:
    """Look until it is done, or time is over.

    Args:
        is_done: Looks; for a message its `Test`, which also lets MPI progress.
        timeout_s: How long.
        spin_s: For so long at first the core is only offered to others: quick answers are seen at
            once. Then naps, each longer than the last.
        longest_nap_s: The longest of them.

    Returns:
        Whether it was done in time.
    """
    if is_done():
        return True
    started = time.monotonic()
    nap = 0.0
    while not is_done():
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            return False
        if waited_s < spin_s:
            os.sched_yield()
        else:
            nap = min(nap * 2 + _SHORTEST_NAP_S, longest_nap_s)
            time.sleep(nap)
    return True


def finish(requests: Iterable[Request], what: str, *, timeout_s: float) -> None:
    """Wait until messages were sent or received.

    Args:
        requests: The messages.
        what: Who is waited for, and for what.
        timeout_s: How long for each; a rank that moves data answers within moments.

    Raises:
        TimedOutError: one was not; it is cancelled.
    """
    for request in requests:
        if not poll(request.Test, timeout_s=timeout_s):
            request.Cancel()
            raise TimedOutError(
                f"timed out after {timeout_s:g} s waiting for {what}; check that rank (an "
                "exception, another code path, a stopped node), or allow more time (timeout_s)"
            )
