"""`hpctrain job render`: the script, on standard output or in a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpctrain.cli.job.options import add_job_options, command_of, job_from
from hpctrain.submit import render, write_script

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "hpctrain job render [options] -- COMMAND [ARGS ...]"
    add_job_options(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="F", help="write it into a file")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Write the script."""
    path = args.output.absolute() if args.output else None
    script = str(path) if path else None
    text = render(*job_from(args, (command_of(args.command),), script=script))
    if path is None:
        print(text, end="")
    else:
        write_script(path, text)
    return 0
