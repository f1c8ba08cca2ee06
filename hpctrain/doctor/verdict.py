"""A check's verdict, and how verdicts are shown. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from hpctrain import __version__

__all__ = ["Check", "Status", "as_json", "exit_code", "render", "summarise"]

Status = Literal["ok", "warning", "broken"]

_WIDTH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What one check found.

    Attributes:
        name: What was checked.
        status: `ok`; `warning`, works now and may hurt; `broken`, does not work.
        text: What was found, one line.
        cure: What to do about it; empty when all is well.
        details: The facts behind the text, plain values.
    """

    name: str
    status: Status
    text: str
    cure: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if anything is broken, else 0: warnings do not fail a script."""
    return 1 if any(check.status == "broken" for check in checks) else 0


def render(check: Check, *, name_width: int) -> str:
    """Draw a verdict as aligned lines, the cure under what it cures."""
    margin = " " * (9 + name_width + 2)
    head = f"{check.status:<7}  {check.name:<{name_width}}  "
    lines = _wrapped(check.text, first=head, margin=margin)
    if check.cure and check.status != "ok":
        lines += _wrapped(check.cure, first=f"{margin}fix: ", margin=f"{margin}     ")
    return "\n".join(lines)


def _wrapped(text: str, *, first: str, margin: str) -> list[str]:
    # Paths and commands are not cut: users copy them.
    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def summarise(checks: Sequence[Check]) -> str:
    """Count the verdicts, in one line."""
    counts = {status: sum(c.status == status for c in checks) for status in ("broken", "warning")}
    if not any(counts.values()):
        return f"all {len(checks)} checks are ok"
    warnings = f"{counts['warning']} warning" + ("s" if counts["warning"] != 1 else "")
    return f"{len(checks)} checks: {counts['broken']} broken, {warnings}"


def as_json(checks: Sequence[Check]) -> dict[str, object]:
    """Put verdicts into plain values, for JSON."""
    order = ("broken", "warning", "ok")
    worst = next((s for s in order if any(check.status == s for check in checks)), "ok")
    return {
        "hpctrain": __version__,
        "status": worst,
        "checks": [asdict(check) for check in checks],
    }
