"""A linter for job scripts of Slurm, PBS and LSF, also those written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable

from hpctrain.submit.lint import rules_directives, rules_ends, rules_environment, rules_ranks
from hpctrain.submit.lint.rule import LEVELS, LintFinding, Rule
from hpctrain.submit.lint.script import read_script

__all__ = ["LEVELS", "RULES", "LintFinding", "Rule", "lint_script"]

_ROOMS = (rules_directives, rules_ranks, rules_environment, rules_ends)
RULES: tuple[Rule, ...] = tuple(
    sorted((rule for room in _ROOMS for rule in room.RULES), key=lambda rule: rule.id)
)
_IGNORED = re.compile(r"^# hpctrain lint: ignore (J\d\d)\b", re.MULTILINE)


def lint_script(
    text: str,
    *,
    exists: Callable[[str], bool],
    slurm: tuple[int, int] | None = None,
    syntax: str = "",
) -> list[LintFinding]:
    """Look for mistakes.

    Args:
        text: The script.
        exists: Whether a folder, as the script names it, is there.
        slurm: The version of Slurm where the script will run; None where it is not known.
        syntax: What `bash -n` said of the script; empty where it found nothing.

    Returns:
        What was found, in the order of lines, of every level. A comment
        `# hpctrain lint: ignore J04` in the script leaves a rule out.
    """
    script = read_script(text, exists, slurm, syntax)
    ignored = set(_IGNORED.findall(text))
    found = [
        LintFinding(
            rule=rule.id,
            level=rule.level_for(script),
            line=line,
            what=what,
            why=rule.why,
            cure=rule.cure,
        )
        for rule in RULES
        if rule.id not in ignored and (not rule.batches or script.batch in rule.batches)
        for line, what in rule.check(script)
    ]
    return sorted(found, key=lambda finding: (finding.line, finding.rule))
