"""Waiting for messages with a bound, and without keeping a core from the rank that sends them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpctrain.errors import TimedOutError

if TYPE_CHECKING:
    from mpi4py.MPI import Request

__all__ = ["finish"]

_SPIN_S = 0.0005
_SHORTEST_NAP_S = 2e-5
_LONGEST_NAP_S = 0.001


def finish(requests: Iterable[Request], what: str, *, timeout_s: float) -> None:
    """Wait until messages have come or gone.

    Args:
        requests: The messages.
        what: Who is waited for, for the error.
        timeout_s: How long; a rank that moves data answers within moments.

    Raises:
        TimedOutError: nothing came in this time.
    """
    for request in requests:
        if request.Test():
            continue
        started = time.monotonic()
        nap = 0.0
        while not request.Test():
            waited_s = time.monotonic() - started
            if waited_s > timeout_s:
                request.Cancel()
                raise TimedOutError(
                    f"waited {timeout_s:g} s for {what}, in vain; see what that rank does (an "
                    "exception, another code path, a stopped node), or allow more time (timeout_s)"
                )
            if waited_s > _SPIN_S:
                nap = min(nap * 2 + _SHORTEST_NAP_S, _LONGEST_NAP_S)
                time.sleep(nap)
