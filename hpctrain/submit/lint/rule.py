"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpctrain.submit.lint.script import Script

__all__ = ["Check", "Finding", "Rule"]

Check = Callable[[Script], Iterable[tuple[int, str]]]
"""From a script to the lines that are wrong and what is wrong there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One mistake: its id, why it costs node-hours, and the cure."""

    id: str
    why: str
    cure: str
    check: Check
    batches: tuple[str, ...] = ()
    """The batch systems it is about; () for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A mistake at a line, counted from 1."""

    rule: str
    line: int
    what: str
    why: str
    cure: str
