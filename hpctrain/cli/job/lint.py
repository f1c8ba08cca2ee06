"""`hpctrain job lint`: the mistakes in a script, each with the line, why, and the cure."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.submit.lint import Finding, lint

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("scripts", nargs="+", type=Path, metavar="SCRIPT", help="job script")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def main(args: argparse.Namespace) -> int:
    """Lint each script; 1 if anything was found."""
    found: dict[str, list[Finding]] = {}
    for path in args.scripts:
        try:
            text = path.read_bytes().decode("utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        found[str(path)] = lint(text, exists=lambda folder: Path(folder).is_dir())
    if args.json:
        print(json.dumps({p: [dataclasses.asdict(f) for f in fs] for p, fs in found.items()}))
    else:
        for path, findings in found.items():
            for finding in findings:
                print(f"{path}:{finding.line}: {finding.rule}: {finding.what}")
                print(f"    {finding.why}\n    to mend it: {finding.cure}")
    return 1 if any(found.values()) else 0
