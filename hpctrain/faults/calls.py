"""What a rank is doing: its collectives, numbered in the order in which it enters them.

`enter` and `leave` are on the path of every collective, so they only write plain attributes: no
locks, and nothing is formatted. The last calls stay known, with the places they were made from.
Whoever wants to know reads a snapshot from another thread.
"""

from __future__ import annotations

import itertools
import sys
from _thread import get_ident
from collections.abc import Sequence
from operator import itemgetter
from time import monotonic

from hpctrain.faults.answer import Call, Standing
from hpctrain.faults.ledger import Page
from hpctrain.faults.sites import Site, describe_site, users_site

__all__ = ["Lane"]

_RING = 64
_MASK = _RING - 1  # 64 is a power of two
_Entry = tuple[int, str, float, Site | None, float | None]
"""Number, name, when it began, where, and how long it may last."""


class Lane:
    """The calls of one group of ranks, which all make the same calls in the same order.

    Several threads may call: each has a stack of its own, so calls may also be nested. A call is
    left by the thread that entered it. The numbers count the whole lane.

    Args:
        ranks: Who makes these calls.
        key: The lane's name, the same on all of them.
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
        """Seconds that the thread that made this lane has spent in its calls."""

    def enter(self, call: str, timeout_s: float | None = None) -> None:
        """A collective begins; `call` names it and is the same on all ranks of the lane.

        Args:
            call: Its name.
            timeout_s: How long it may last; None: as long as the call that contains it, or else any
                of this lane.
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
                "leave() without enter(): each collective is left by the thread that entered it"
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

    def standing(self) -> Standing:
        """Where this rank stands in the lane."""
        now = monotonic()
        ended = self._ended
        # The stacks before the ring: a call that is open is then always known by name, too.
        stacks = self._open_stacks()
        recent = {number: name for number, name, *_ in list(self._ring) if number}
        return Standing(
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

    def page(self) -> Page:
        """This rank's last calls, and where they were made."""
        entries = sorted((entry for entry in list(self._ring) if entry[0]), key=itemgetter(0))
        return Page(
            names={number: name for number, name, *_ in entries},
            places={number: describe_site(site) for number, _, _, site, _ in entries},
        )

    def _open_stacks(self) -> list[tuple[_Entry, ...]]:
        """Copies of the stacks that are not empty; those of threads that died are dropped."""
        # Not the frames themselves: this one's would keep itself, and all others' variables, alive.
        alive = frozenset(sys._current_frames())
        copies = [(ident, tuple(stack)) for ident, stack in list(self._stacks.items())]
        return [stack for ident, stack in copies if stack and ident in alive]
