"""`hpctrain bench scale`: how a script scales on this machine."""

from __future__ import annotations

import argparse
import os

from hpctrain import log
from hpctrain.bench import (
    MODES,
    Folder,
    Sweep,
    choose,
    describe_machine,
    numbers,
    plan_points,
    run_sweep,
)
from hpctrain.cli.bench.options import (
    add_output,
    add_settings,
    conclude,
    settings_of,
)
from hpctrain.cli.bench.program import subject_of
from hpctrain.engines import AUTO, communicating_names

__all__ = ["add_arguments", "add_scaling", "engines_of", "main"]

_MORE = """\
Every point is a separate launch (`hpctrain run`); launches are interleaved and repeated. Two
baselines are measured as well: the undistributed script on one rank's cores, the reference for
efficiency, and one process with all cores. A failed launch is a row with the reason; the same
command resumes after an interruption and retries failed launches.

{batch}, {ranks} and the keys of --vary may appear in the script's arguments. A CONFIG.toml is
measured as `hpctrain train` would train it: --vary takes its keys (precision.kind=fp32,bf16), and
after it only --set KEY=VALUE may follow.

examples:
  hpctrain bench scale --ranks 1,2,4 --mode weak --batch 64 train.py
  hpctrain bench scale --ranks 2,4 --engines mpi,torch --vary precision=fp32,bf16 train.py
  hpctrain bench scale --ranks 1,2,4 train.toml --set optimizer.args.fused=true
  hpctrain bench scale --ranks 1,2 --mode strong --batch 128 other.py --batch-size {batch}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; everything after the script belongs to the script."""
    parser.epilog = _MORE
    parser.usage = (
        "hpctrain bench scale --ranks 1,2,4 [options] SCRIPT|-m MODULE|CONFIG.toml [ARGS ...]"
    )
    parser.add_argument("--ranks", required=True, metavar="N,M", help="numbers of ranks")
    add_scaling(parser)
    parser.add_argument(
        "--threads",
        type=int,
        metavar="T",
        help="threads per rank (default: what is left to each at the most ranks)",
    )
    add_settings(parser, folder="bench-scale")
    add_output(parser)


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """Declare what a curve is made of."""
    known = (AUTO, *communicating_names())
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="weak",
        help="weak: every rank adds a share to the batch; strong: the ranks divide one batch",
    )
    parser.add_argument(
        "--engines",
        default="auto",
        metavar="A,B",
        help=f"from {', '.join(known)} (default: auto, the script's own choice)",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="K=A,B",
        help="a setting that the script reads, such as precision=fp32,bf16 or autotune=off,on",
    )


def engines_of(args: argparse.Namespace) -> list[str]:
    """The engines that `--engines` names.

    Raises:
        ConfigError: there is no such engine.
    """
    return choose("engine", args.engines, (AUTO, *communicating_names()))


def main(args: argparse.Namespace) -> int:
    """Measure what is missing, and show everything."""
    subject = subject_of(args)
    program = subject.program
    settings = settings_of(args, mode=args.mode, batch=subject.batch)
    points = plan_points(
        mode=args.mode,
        ranks=numbers("--ranks", args.ranks),
        engines=engines_of(args),
        num_cores=len(os.sched_getaffinity(0)),
        num_threads=args.threads,
        vary=args.vary,
    )
    sweep = Sweep(
        target=program.target,
        is_module=program.is_module,
        arguments=program.arguments,
        label=subject.label,
        settings=settings,
        points=tuple(points),
    )
    folder = Folder(args.dir)
    folder.begin(sweep)
    run_here(folder, sweep)
    return conclude(args, folder, sweep)[0]


def run_here(folder: Folder, sweep: Sweep) -> None:
    """Measure what is missing on this machine."""
    from hpctrain.install import loaded_mpi

    folder.write_machine(describe_machine(mpi=str(loaded_mpi().mpi)))
    run_sweep(folder, sweep, os.environ, say=log.notice)
