"""What a rank says about itself when it is asked where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Answer", "Call", "Silence", "Standing", "quote"]


def quote(name: str, limit: int = 400) -> str:
    """Quote a call's name for a message; names of many parameters are cut."""
    return f"'{name}'" if len(name) <= limit else f"'{name[:limit]}...'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One collective of a lane: its number, its name, and the seconds in it or since it."""

    number: int
    name: str
    seconds: float
    timeout_s: float = 0.0
    """How long it may last, as far as this rank is asked: 0 where it is another's call."""

    def __str__(self) -> str:
        return f"{quote(self.name)} #{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a rank stands in a lane."""

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
    """How many threads have made calls in this lane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a rank says about itself."""

    standing: Standing
    patience_s: float
    """How long it asks all to wait just now, where its own calls or work take long; 0: no longer
    than they would."""
    surveying: bool = False
    """Whether it is asking the others itself."""
    elsewhere: tuple[str, ...] = ()
    """Calls that it is in on other lanes."""
    place: str = ""
    """The line of the user's code that its main thread is in."""

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Answer:
        """An answer as it came over the channel, made by `dataclasses.asdict`."""
        standing = told["standing"]
        ended = standing["ended"]
        return cls(
            standing=Standing(
                entered=standing["entered"],
                open=tuple(Call(**call) for call in standing["open"]),
                innermost=tuple(standing["innermost"]),
                ended=None if ended is None else Call(**ended),
                recent={int(number): name for number, name in standing["recent"].items()},
                num_threads=standing["num_threads"],
            ),
            patience_s=told["patience_s"],
            surveying=told["surveying"],
            elsewhere=tuple(told["elsewhere"]),
            place=told["place"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """A rank that does not answer, and what is known of why."""

    reason: str
