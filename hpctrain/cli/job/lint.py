"""`hpctrain job lint`: the mistakes in a script, each with the line, why, and the cure."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path

from hpctrain.batch_systems import ask_program, find_system
from hpctrain.errors import ConfigError
from hpctrain.submit import LEVELS, LintFinding, lint_script

__all__ = ["add_arguments", "main"]

_BASH = re.compile(r"#!.*\b(ba|da)?sh\b|(?!#!)")
_DIRECTIVE = re.compile(r"^#\s*(SBATCH|PBS|BSUB|flux:)", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("scripts", nargs="+", type=Path, metavar="SCRIPT", help="job script")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default=LEVELS[0],
        help="lowest level that is shown and counted: warning (default), or note, which is often "
        "harmless",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(args: argparse.Namespace) -> int:
    """Lint each script; 1 if anything of the level was found."""
    shown = LEVELS[: LEVELS.index(args.level) + 1]
    found: dict[str, list[LintFinding]] = {}
    notes = 0
    slurm = find_system("slurm").version(ask_program)
    for path in args.scripts:
        try:
            text = path.read_bytes().decode("utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if path.suffix == ".py" and not _DIRECTIVE.search(text):
            raise ConfigError(
                f"{path} is a Python file and not a job script; lint the script that starts it, or "
                f"write one: `hpctrain job render ... -- python {path}`"
            )
        every = lint_script(
            text, exists=lambda folder: Path(folder).is_dir(), slurm=slurm, syntax=check(path, text)
        )
        found[str(path)] = [finding for finding in every if finding.level in shown]
        notes += len(every) - len(found[str(path)])
    if args.json:
        print(json.dumps({p: [dataclasses.asdict(f) for f in fs] for p, fs in found.items()}))
    else:
        for path_text, findings in found.items():
            for finding in findings:
                print(f"{path_text}:{finding.line}: {finding.level} {finding.rule}: {finding.what}")
                print(f"    {finding.why}\n    fix: {finding.cure}")
        if notes:
            print(f"{notes} more of level note, often harmless: show them with --level note")
    return 1 if any(found.values()) else 0


def check(path: Path, text: str) -> str:
    """What `bash -n` says of a script for a shell of the Bourne family; empty if nothing."""
    answer = ask_program(["bash", "-n", str(path)]) if _BASH.match(text) else None
    return answer.err if answer and answer.code else ""
