"""`hpctrain bench compare OLD NEW`: what is slower beyond noise, or counts more."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hpctrain import log
from hpctrain.bench import (
    COUNTS_SCHEMA,
    Compared,
    compare_counts,
    compare_times,
    counts_of,
    upgrade,
    validate,
)
from hpctrain.errors import ConfigError

__all__ = ["add_arguments", "compare_files", "main"]

_MORE = """\
Times are compared on one kind of machine: slower is a point whose interval lies above the old one's
by more than the tolerance. Counts (messages, hooks, bytes of a step) are exact on every machine:
each that grew is a regression. Points that only one of the results has are only listed;
those that one of them measured once have no verdict.

exit codes: 0 nothing is worse; 1 something is; 2 the results cannot be compared

examples:
  hpctrain bench compare old.json new.json
  hpctrain bench compare --counts benchmarks/results/counts.json new.json
  hpctrain bench compare --write-counts counts.json new.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _MORE
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="old, then new")
    parser.add_argument("--counts", action="store_true", help="compare counts instead of times")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.03,
        metavar="X",
        help="how much slower is still the same (default: 0.03)",
    )
    parser.add_argument(
        "--write-counts", type=Path, metavar="OUT", help="keep the counts of these results instead"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def main(args: argparse.Namespace) -> int:
    """Compare, or keep counts."""
    if args.write_counts is not None:
        table = counts_of([_read(path) for path in args.results])
        args.write_counts.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        return 0
    if len(args.results) != 2:
        raise ConfigError(f"{len(args.results)} results were given; give the old and the new one")
    return compare_files(
        *args.results, counts=args.counts, tolerance=args.tolerance, as_json=args.json
    )


def compare_files(
    old: Path, new: Path, *, counts: bool = False, tolerance: float = 0.03, as_json: bool = False
) -> int:
    """Show what differs; 1 where something is worse.

    Raises:
        ConfigError: a file is not a result, or the two cannot be compared.
    """
    if not 0 <= tolerance < float("inf"):
        raise ConfigError(f"--tolerance {tolerance:g} must be 0 or more; 0.03 is 3 %")
    before, after = _read(old, counts=counts), _read(new, counts=counts)
    if counts:
        counted = compare_counts(before, after)
        bad = sum(row.verdict == "more" for row in counted)
        rows = [[r.case, r.variant, r.name, r.old, r.new, r.verdict] for r in counted]
        headers = ["case", "variant", "count", "old", "new", ""]
    else:
        compared = compare_times(before, after, tolerance=tolerance)
        bad = sum(row.verdict == "slower" for row in compared)
        rows = [[r.case, r.variant, _ratio(r), r.verdict] for r in compared]
        headers = ["case", "variant", "new / old", ""]
    if all(row[-1] == "missing" for row in rows):
        raise ConfigError(
            f"{old} and {new} have no point in common, so nothing was compared; give two results "
            "of the same script and mode"
        )
    once = sum(row[-1] == "unrepeated" for row in rows)
    if once:
        log.warn(
            f"{once} of {len(rows)} points were measured once in one of the results, which tells "
            "no difference from noise: they have no verdict; measure with --repeats 3 or more"
        )
    if as_json:
        print(json.dumps([dict(zip(headers, row, strict=True)) for row in rows], indent=1))
    else:
        shown = [row for row in rows if row[-1] != "same"] or rows
        print(log.table(headers, [["" if c is None else c for c in row] for row in shown]))
        what = "counts have grown" if counts else "points are slower beyond noise"
        log.notice(f"{bad} of {len(rows)} {what}" if bad else f"none of {len(rows)} {what}")
    return 1 if bad else 0


def _ratio(row: Compared) -> str:
    """New over old, with an interval where both were repeated."""
    if row.verdict == "missing":
        return ""
    if row.verdict == "unrepeated":
        return f"{row.ratio:.3f}"
    return f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]"


def _read(path: Path, *, counts: bool = False) -> dict[str, Any]:
    try:
        table = upgrade(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if counts and isinstance(table, dict) and table.get("schema") == COUNTS_SCHEMA:
        return table
    wrong = validate(table)
    if wrong or not isinstance(table, dict):
        raise ConfigError(f"{path} is not a result: {'; '.join(wrong)}")
    return table
