"""The ledger: where the calls of two ranks first differ. Pure, from the last calls of each.

Every rank keeps its last calls with their names (which hold shape and dtype) and the places in the
user's code. Calls are numbered in order, so calls with the same number should be the same call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.faults.answer import quote
from hpctrain.log import format_ranges

__all__ = ["Divergence", "Page", "find_divergence", "render_calls"]

_CARGO = re.compile(r"(?P<call>.*) (?P<dtype>\w+) \((?P<shape>[^()]*)\)")
_MOST_GROUPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A rank's last calls: by number the name, and where in the user's code it was made."""

    names: Mapping[int, str]
    places: Mapping[int, str]

    @classmethod
    def read(cls, told: Mapping[str, Mapping[str, str]]) -> Page:
        """A page as it came over the channel, where keys are texts."""
        return cls(
            names={int(number): name for number, name in told["names"].items()},
            places={int(number): place for number, place in told["places"].items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that made the same call."""

    ranks: tuple[int, ...]
    name: str
    how: str = ""
    """How it differs from what most did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first number at which ranks made different calls; the first group is the usual one."""

    number: int
    groups: tuple[Group, ...]


def find_divergence(recent: Mapping[int, Mapping[int, str]]) -> Divergence | None:
    """Find the first call that is not the same on all ranks.

    Args:
        recent: By rank, the names of its last calls by number. Calls that a rank has not made yet,
            or has forgotten, do not count.

    Returns:
        Most ranks' call first; where there is no majority, the lowest rank's.
    """
    for number in sorted({number for names in recent.values() for number in names}):
        made = {rank: names[number] for rank, names in sorted(recent.items()) if number in names}
        common = Counter(made.values()).most_common()
        if len(common) < 2:
            continue
        groups = []
        usual_rank = next(rank for rank, name in made.items() if name == common[0][0])
        for name, _ in common:
            ranks = tuple(rank for rank, own in made.items() if own == name)
            usual, odd = (_from(recent[rank], number) for rank in (usual_rank, ranks[0]))
            how = "" if name == common[0][0] else _how(usual, odd)
            groups.append(Group(ranks=ranks, name=name, how=how))
        return Divergence(number=number, groups=tuple(groups))
    return None


def _from(names: Mapping[int, str], number: int) -> list[str]:
    """The calls from a number on, as far as they follow each other."""
    found = []
    while number in names:
        found.append(names[number])
        number += 1
    return found


def _how(usual: Sequence[str], odd: Sequence[str]) -> str:
    """In which way the odd sequence differs from the usual one; they differ in the first call."""
    if odd[:2] == usual[1::-1] and len(odd) > 1:
        return "in another order"
    if len(usual) > 1 and all(a == b for a, b in zip(odd, usual[1:], strict=False)):
        return f"skipped {quote(usual[0])}"
    if len(odd) > 1 and all(a == b for a, b in zip(odd[1:], usual, strict=False)):
        return "a call that the others did not make"
    mine, theirs = _CARGO.fullmatch(odd[0]), _CARGO.fullmatch(usual[0])
    if mine and theirs and mine["call"] == theirs["call"]:
        return "another shape" if mine["dtype"] == theirs["dtype"] else "another dtype"
    return "another call"


def render_calls(
    number: int, found: Divergence | None, pages: Mapping[int, Page], *, waiting: int, places: bool
) -> list[str]:
    """The lines that name the calls that differ and where they were made.

    Args:
        number: Of the call that does not end.
        found: Where the calls differ first; None where they do not.
        pages: The last calls of some ranks of each kind.
        waiting: A rank that waits in that call.
        places: Whether calls of the same name are worth comparing by place.
    """
    if found is not None:
        return [
            f"  the ranks' calls differ first at #{found.number}:",
            *_render_groups(found, pages),
        ]
    lines = []
    if waiting in pages and (place := pages[waiting].places.get(number)):
        lines.append(f"  rank {waiting} waits at {place}")
    parted = _first_parting(pages) if places else None
    if parted is not None:
        lines.append(f"  call #{parted} has one name on all ranks, and was made in several places:")
        for rank, page in sorted(pages.items()):
            if place := page.places.get(parted):
                lines.append(f"    rank {rank} at {place}")
    return lines


def _first_parting(pages: Mapping[int, Page]) -> int | None:
    """The first number whose calls were made from different places."""
    for number in sorted({number for page in pages.values() for number in page.places}):
        places = {page.places[number] for page in pages.values() if number in page.places}
        if len(places) > 1:
            return number
    return None


def _render_groups(found: Divergence, pages: Mapping[int, Page]) -> list[str]:
    lines = []
    for group in found.groups[:_MOST_GROUPS]:
        s = "s" if len(group.ranks) > 1 else ""
        how = f" ({group.how})" if group.how else ""
        ranks = format_ranges(group.ranks, limit=16)
        lines.append(f"    rank{s} {ranks}: {quote(group.name)}{how}")
        page = next((pages[rank] for rank in group.ranks if rank in pages), None)
        if page is not None and (place := page.places.get(found.number)):
            lines.append(f"      at {place}")
    if len(found.groups) > _MOST_GROUPS:
        lines.append(f"    and {len(found.groups) - _MOST_GROUPS} other calls")
    return lines
