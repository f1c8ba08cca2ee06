"""Where the state of a divided optimizer lies: one copy in the memory that a node shares. Pure.

A tensor as large as its parameter (a momentum) is laid out whole, each fragment at its place, so
that every rank can see all of it; anything else (a step count) has a place per fragment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Entry", "Slot", "lay_out"]

_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """A state tensor that an optimizer has made for a fragment."""

    parameter: int
    start: int
    """Of the fragment, within the parameter."""
    key: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    whole: bool
    """Whether it has an element for every element of the fragment."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a block: bytes from its start, and elements."""

    offset: int
    num_elements: int


def lay_out(
    entries: Iterable[Entry], sizes: Sequence[int]
) -> tuple[dict[tuple[int, int | None, str], Slot], int]:
    """Give each entry a slot; those of one parameter that are parts of a whole share one.

    Args:
        entries: Of all fragments of a node.
        sizes: Elements of each parameter.

    Returns:
        Slots by parameter, fragment (None where it is whole) and key; and the bytes of the block.
    """
    slots: dict[tuple[int, int | None, str], Slot] = {}
    end = 0
    for entry in sorted(entries, key=lambda e: (e.key, e.parameter, e.start)):
        place = (entry.parameter, None if entry.whole else entry.start, entry.key)
        if place in slots:
            continue
        number = sizes[entry.parameter]
        if not entry.whole:
            number = 1
            for length in entry.shape:
                number *= length
        slots[place] = Slot(end, number)
        end += -(-number * entry.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
    return slots, end
