"""A linter for job scripts of Slurm, PBS and LSF, also those written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable

from hpctrain.submit.lint import rules_directives, rules_ends, rules_ranks
from hpctrain.submit.lint.rule import Finding, Rule
from hpctrain.submit.lint.script import read_script

__all__ = ["RULES", "Finding", "Rule", "lint"]

RULES: tuple[Rule, ...] = tuple(
    sorted((*rules_directives.RULES, *rules_ranks.RULES, *rules_ends.RULES), key=lambda r: r.id)
)
_IGNORED = re.compile(r"^# hpctrain lint: ignore (J\d\d)\b", re.MULTILINE)


def lint(text: str, *, exists: Callable[[str], bool]) -> list[Finding]:
    """Look for mistakes.

    Args:
        text: The script.
        exists: Whether a folder, as the script names it, is there.

    Returns:
        What was found, in the order of lines. A comment `# hpctrain lint: ignore J04` in the
        script leaves a rule out.
    """
    script = read_script(text, exists)
    ignored = set(_IGNORED.findall(text))
    found = [
        Finding(rule=rule.id, line=line, what=what, why=rule.why, cure=rule.cure)
        for rule in RULES
        if rule.id not in ignored and (not rule.batches or script.batch in rule.batches)
        for line, what in rule.check(script)
    ]
    return sorted(found, key=lambda finding: (finding.line, finding.rule))
