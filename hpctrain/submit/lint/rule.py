"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpctrain.submit.lint.script import Script

__all__ = ["LEVELS", "Check", "LintFinding", "Rule"]

LEVELS = ("warning", "note")
"""A warning is likely to cost a job or node-hours; a note is often harmless."""

Check = Callable[[Script], Iterable[tuple[int, str]]]
"""From a script to the lines that are wrong and what is wrong there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One mistake: its id, why it costs node-hours, and the cure."""

    id: str
    why: str
    cure: str
    check: Check
    level: str | Callable[[Script], str] = "warning"
    """One of LEVELS, or a function that chooses it for a script."""
    batches: tuple[str, ...] = ()
    """The batch systems it is about; () for all."""

    def level_for(self, script: Script) -> str:
        """The level of what this rule finds in a script."""
        return self.level if isinstance(self.level, str) else self.level(script)


@dataclass(frozen=True, kw_only=True, slots=True)
class LintFinding:
    """A mistake at a line, counted from 1."""

    rule: str
    level: str
    line: int
    what: str
    why: str
    cure: str
