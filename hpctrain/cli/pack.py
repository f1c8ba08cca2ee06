"""`hpctrain pack`: an environment in one archive."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hpctrain import log
from hpctrain.submit import outside_paths, pack_environment

__all__ = ["add_arguments", "main"]

_EPILOG = """\
The archive is copied to every node's local disk with `hpctrain job submit --pack FILE`: by sbcast
in Slurm, else read once by one process per node. The interpreter itself is not packed.

exit codes: 0 packed; 2 not a virtual environment, or the archive cannot be written
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--prefix",
        type=Path,
        default=Path(sys.prefix),
        metavar="D",
        help="virtual environment (default: this one)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("env.tar"), metavar="F", help="default: env.tar"
    )


def main(args: argparse.Namespace) -> int:
    """Pack, and say what is left outside."""
    count = pack_environment(args.prefix.absolute(), args.output)
    for path in outside_paths(args.prefix.absolute()):
        log.warn(f"{path} is outside the environment and not in the archive; ranks read it there")
    print(f"{args.output}: {count} entries, {args.output.stat().st_size >> 20} MiB")
    return 0
