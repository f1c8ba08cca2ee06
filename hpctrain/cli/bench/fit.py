"""`hpctrain bench fit`: a machine file for `hpctrain plan`, from measurements on this machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hpctrain import log
from hpctrain.errors import ConfigError
from hpctrain.scaling.harness.command import choose, numbers

__all__ = ["add_arguments", "main"]

_ENGINES = ("mpi", "horovod", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("output", type=Path, metavar="OUT.toml", help="the machine file to write")
    parser.add_argument(
        "--ranks", metavar="N,M", help="numbers of ranks, 1 among them (default: 1, 2 .. cores)"
    )
    parser.add_argument(
        "--engines", default="mpi", metavar="A,B", help=f"from {', '.join(_ENGINES)} (default: mpi)"
    )
    parser.add_argument("--title", default="this machine", help="a line about the machine")


def main(args: argparse.Namespace) -> int:
    """Measure latency, bandwidth and contention, fit them, and write the file."""
    from hpctrain.scaling.plan.machine_files import write_machine
    from hpctrain.scaling.plan.measuring import fit_here

    if args.output.suffix != ".toml":
        raise ConfigError(f"{args.output} must end in .toml: it is a machine file")
    cores = len(os.sched_getaffinity(0))
    default = sorted({1, 2, *(2**i for i in range(2, 12) if 2**i <= cores)})
    ranks = default if args.ranks is None else numbers("--ranks", args.ranks)
    engines = choose("engine", args.engines, _ENGINES)
    machine = fit_here(ranks, engines, title=args.title)
    write_machine(machine, args.output)
    log.notice(f"{args.output} is for `hpctrain plan --machine {args.output}`")
    return 0
