"""`hpctrain watch`: follow a run from its directory; reads files and nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments", "main"]

_MORE = """\
Works wherever the run directory can be read, on a login node too: neither torch nor MPI is needed.
It ends when the run does.

examples:
  hpctrain watch runs/digits
  hpctrain watch runs/digits --once

exit codes: 0 the run finished, or --once; 75 it stopped and is to be run again; 1 it failed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.epilog = _MORE
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run directory")
    parser.add_argument("--once", action="store_true", help="print the status once, and exit")
    parser.add_argument("--json", action="store_true", help="with --once: as JSON")
    parser.add_argument(
        "--every",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="how often to read the files (default: 2)",
    )


def main(args: argparse.Namespace) -> int:
    """Follow the run."""
    from hpctrain.train import follow, show_once

    if args.once:
        return show_once(args.directory, as_json=args.json)
    return follow(args.directory, every_s=args.every)
