"""`hpctrain report`: a page, pictures and tables of results and runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

__all__ = ["add_arguments", "main"]

_MORE = """\
RESULTS are files that `hpctrain bench` wrote, run directories of `hpctrain train`, and folders that
`hpctrain run --trace` recorded into, in any mixture. The page is self-contained: no network, no
scripts. png and pdf need matplotlib: pip install 'hpctrain[plot]'.

examples:
  hpctrain report scale.json -o scaling.html
  hpctrain report scale.json --samples 1.2e8 --runs 5 --format html,tex,png -o proposal/
  hpctrain report runs/one traces/one
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.epilog = _MORE
    parser.add_argument("inputs", nargs="+", type=Path, metavar="RESULTS")
    parser.add_argument(
        "-o",
        dest="out",
        type=Path,
        default=Path("report"),
        metavar="OUT",
        help="a folder (default: report), or one .html file",
    )
    parser.add_argument(
        "--format",
        default="html",
        metavar="F,F",
        help="html, png, pdf, csv, md, tex, or all (default: html)",
    )
    parser.add_argument("--title", help="of the report")
    parser.add_argument(
        "--samples",
        type=float,
        metavar="N",
        help="samples to train on, all epochs together: prices every point in node-hours",
    )
    parser.add_argument(
        "--runs", type=int, default=1, metavar="K", help="number of trainings (default: 1)"
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=0.25,
        metavar="R",
        help="extra share to request (default: 0.25)",
    )
    parser.add_argument("--json", action="store_true", help="list the files as JSON")


def main(args: argparse.Namespace) -> int:
    """Write the report, and name its files."""
    from hpctrain.report import FORMATS, PlannedTraining, write_report

    formats = FORMATS if args.format == "all" else tuple(args.format.split(","))
    planned = None
    if args.samples is not None:
        planned = PlannedTraining(num_samples=args.samples, reserve=args.reserve, runs=args.runs)
    written = write_report(
        args.inputs, args.out, formats=formats, title=args.title, planned=planned
    )
    if args.json:
        print(json.dumps([str(path) for path in written]))
    else:
        print("\n".join(str(path) for path in written))
    return 0
