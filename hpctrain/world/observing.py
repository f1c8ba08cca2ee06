"""Observers of what a rank does: the phases of its steps, as they begin and end. Pure.

Upper floors notify `world.observers`; a tracer, a step timer or a display listens. If nothing
does, nothing is called and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

__all__ = ["PHASES", "Observer", "Phase", "observed", "phase"]

T = TypeVar("T")
Phase = str

PHASES: tuple[Phase, ...] = ("input", "forward", "backward", "exchange", "update")
"""The phases of a step. `exchange` is the communication that backward does not hide; the rest is
the script's own."""


class Observer(Protocol):
    """Called in the thread that does the work, and must be quick.

    Phases nest: what is inside another belongs to the inner one alone. On a GPU the times between
    the calls are those of launching kernels, unless an observer waits for the device in each.
    """

    def begin(self, name: Phase) -> None:
        """A phase begins on this rank."""

    def end(self, name: Phase) -> None:
        """The phase that began last has ended, by an exception perhaps."""

    def stepped(self, number: int) -> None:
        """The weights were updated, or all ranks skipped it: the `number`th step has ended."""


class phase:
    """A block that is one phase to all observers; a class, since it is on the path of every step.

    Args:
        observers: The observers to notify.
        name: Of the phase.
    """

    __slots__ = ("_name", "_observers")

    def __init__(self, observers: list[Observer], name: Phase) -> None:
        self._observers = observers
        self._name = name

    def __enter__(self) -> None:
        for observer in self._observers:
            observer.begin(self._name)

    def __exit__(self, *failure: object) -> None:
        for observer in reversed(self._observers):
            observer.end(self._name)


def observed(items: Iterator[T], observers: list[Observer], name: Phase) -> Iterator[T]:
    """The same items; waiting for each is one phase to all observers."""
    while True:
        with phase(observers, name):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
