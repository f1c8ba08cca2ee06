"""Ranks compare a few numbers while training is blocked: one message, no longer than it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hpctrain.errors import TimedOutError
from hpctrain.world import World, roll_call

__all__ = ["meet", "most"]

_LONGEST_NAP_S = 0.0005
_MARGIN_S = 60.0


def meet(world: World, numbers: Sequence[int], what: str, *, timeout_s: float) -> list[bool]:
    """Collective: for each number, whether it is the same on all ranks.

    Everyone sleeps in between, so that ranks that still copy have the cores.

    Raises:
        TimedOutError: some ranks did not come in time; they are named.
    """
    mine = np.array([*numbers, *(-number for number in numbers)], np.int64)
    found = most(world, mine, what, timeout_s=timeout_s)
    half = len(numbers)
    return [bool(found[i] == -found[half + i]) for i in range(half)]


def most(world: World, mine: np.ndarray, what: str, *, timeout_s: float) -> np.ndarray:
    """Collective: the largest of each number on all ranks.

    Raises:
        TimedOutError: some ranks did not come in time; they are named.
    """
    if world.size == 1:
        return mine
    from mpi4py import MPI

    found = np.empty_like(mine)
    with world.watching.announce(what, timeout_s=timeout_s):
        request = world.comm.Iallreduce(mine, found, op=MPI.MAX)
        # Where there is a watchdog, it speaks first: it can tell what the missing ranks do.
        limit_s = timeout_s if world.watching.watchdog is None else 2 * timeout_s + _MARGIN_S
        deadline = time.monotonic() + limit_s
        nap = 0.0
        while not request.Test():
            if time.monotonic() > deadline:
                roll_call(world.comm, what, timeout_s=1.0)  # names those who are missing
                raise TimedOutError(f"{what}: the ranks did not meet within {limit_s:g} s")
            time.sleep(nap)
            nap = min(nap * 2 + 1e-5, _LONGEST_NAP_S)
    return found
