"""`hpctrain bench fit`: a machine file for `hpctrain plan`, from measurements on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpctrain import log
from hpctrain.bench import numbers
from hpctrain.engines import communicating_names
from hpctrain.errors import ConfigError
from hpctrain.predict import LOAD_LIMIT, render_machine, write_machine

__all__ = ["add_arguments", "main"]

_MORE = """\
Each number of ranks is launched --repeats times, all numbers in turn, and medians count: computing
without communication, for contention between ranks of a node, and allreduces of
4 KiB to 64 MiB on each engine. On one node there is no network to measure, and the file is valid
for that node. The background load is in the file, with a warning if it exceeded 5 % of the cores.

exit codes: 0 success; 1 a launch failed; 2 usage error

examples:
  hpctrain bench fit --ranks 1,2,4 mine.toml
  hpctrain plan --profile p.json --machine mine.toml --ranks 8,16 --ranks-per-node 16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _MORE
    parser.add_argument("output", type=Path, metavar="M.toml", help="the file to write")
    parser.add_argument("--ranks", default="1,2", metavar="A,B", help="1 among them; default: 1,2")
    parser.add_argument("--engines", default="mpi", metavar="A,B", help="default: mpi")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="K", help="launches of each number (default: 3)"
    )
    parser.add_argument("--title", default="this machine", help="a line about the machine")


def main(args: argparse.Namespace) -> int:
    """Measure, fit and write."""
    ranks = numbers("--ranks", args.ranks)
    engines = args.engines.split(",")
    known = communicating_names()
    if unknown := sorted(set(engines) - set(known)):
        raise ConfigError(f"--engines {', '.join(unknown)}; choose from {', '.join(known)}")
    if args.output.suffix != ".toml" or not args.output.absolute().parent.is_dir():
        raise ConfigError(f"{args.output} must end in .toml, in an existing folder")
    if args.repeats < 1:
        raise ConfigError(f"--repeats {args.repeats} must be at least 1")
    from hpctrain.predict import fit_here

    machine = fit_here(ranks, engines, repeats=args.repeats, title=args.title)
    write_machine(machine, args.output)
    print(render_machine(machine), end="")
    if machine.is_disturbed:
        log.warn(
            f"other processes used {machine.foreign_load:.0%} of the cores while this was "
            "measured (at most "
            f"{LOAD_LIMIT:.0%} is quiet): do not trust these numbers; measure again"
        )
    log.notice(f"written to {args.output}")
    return 0
