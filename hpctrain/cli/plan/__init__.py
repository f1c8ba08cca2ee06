"""`hpctrain plan`: what happens at N ranks, before there are N ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpctrain import log
from hpctrain.cli.plan.predicting import (
    check_given,
    check_ranks,
    machine_from,
    parse_ranks,
    predict_from,
    print_list,
    print_plan,
    profile_from,
    take_config,
)
from hpctrain.cli.plan.sizing import add_sizing, check_sizing, print_grids
from hpctrain.engines import communicating_names
from hpctrain.errors import ConfigError
from hpctrain.predict import TOPOLOGIES, write_profile
from hpctrain.wire import BITS

__all__ = ["add_arguments", "main"]

_EPILOG = """\
A profile is what one rank does in a step. It is measured on this machine, from CONFIG.toml or with
a function that returns a hpctrain.predict.Subject; a machine is one of --machines, or what
`hpctrain bench fit` wrote. All predictions are simulated and labelled so.

exit codes: 0 success; 1 a rehearsal found an error, no grid fits, or something failed; 2 the
command line or a file is wrong

examples:
  hpctrain plan train.toml --machine cpu-ethernet-25g --ranks 8,64
  hpctrain plan --measure-profile p.json --subject train.py:subject
  hpctrain plan --profile p.json --machine perlmutter-gpu --ranks 8,64,512,4096
  hpctrain plan --profile p.json --machine mine.toml --ranks 64 --global-batch 8192 --json
  hpctrain plan --rehearse --profile p.json --machine frontier --ranks 512 --global-batch 8192 \\
      --samples 1281167 --epochs 90 --time 12h --site frontier --save-dir runs
  hpctrain plan --memory --subject train.py:subject --ranks 64 --memory-per-rank 80GB
  hpctrain plan --memory --subject train.py:subject --ranks 64 --machine perlmutter-gpu \\
      --tflops 120 --precision bf16 --tensor '*.up=column' --tensor '*.down=row'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG.toml", help="what `hpctrain train` takes"
    )
    parser.add_argument("--profile", type=Path, metavar="P.json", help="one rank's step")
    parser.add_argument("--machine", metavar="M", help="a name, or a file that ends in .toml")
    parser.add_argument("--machines", action="store_true", help="list the known machines")
    parser.add_argument("--ranks", metavar="A,B", help="numbers of ranks, such as 8,64,512")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    how = parser.add_argument_group("how gradients travel (default: as hpctrain.distribute does)")
    how.add_argument("--engine", choices=communicating_names(), help="the engine whose costs apply")
    how.add_argument("--topology", choices=TOPOLOGIES, help="the allreduce algorithm")
    how.add_argument("--bucket-mib", type=float, metavar="M", help="fusion size; 0: all at once")
    how.add_argument("--cycle-ms", type=float, metavar="T", help="pieces are sent every T ms")
    how.add_argument("--accumulate", type=int, metavar="K", help="passes per step (default: 1)")
    how.add_argument("--wire", choices=tuple(BITS), help="between nodes (default: none)")
    how.add_argument("--wire-bits", type=int, choices=(16, 32), default=32, help="on all links")
    what = parser.add_argument_group("scenario")
    what.add_argument("--global-batch", type=int, metavar="G", help="of all ranks: strong scaling")
    what.add_argument("--ranks-per-node", type=int, metavar="R", help="instead of the machine's")
    what.add_argument("--train-samples", type=_count, default=0, metavar="N", help="for node-hours")
    what.add_argument("--efficiency", type=float, default=0.8, metavar="E", help="still worth it")
    _add_rehearsal(parser.add_argument_group("rehearsing a job on virtual ranks"))
    add_sizing(parser.add_argument_group("models larger than a device"))
    own = parser.add_argument_group("measuring a profile")
    own.add_argument("--measure-profile", type=Path, metavar="OUT", help="write OUT and exit")
    own.add_argument("--subject", metavar="FILE:NAME", help="what to measure")
    own.add_argument("--repeats", type=int, default=20, metavar="K", help="steps (default: 20)")


def _count(text: str) -> int:
    """A whole number, also as 1.2e9, which `hpctrain report` takes."""
    value = float(text)
    if not value.is_integer():
        raise ValueError(text)
    return int(text) if text.lstrip("+-").isdigit() else int(value)


def _add_rehearsal(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rehearse", action="store_true", help="report what would break, and exit")
    group.add_argument(
        "--samples", type=_count, metavar="N", help="of the data; default: profile's"
    )
    group.add_argument("--epochs", type=int, metavar="E", help="default: 1")
    group.add_argument("--drop-last", action="store_true", help="drop a last, smaller batch")
    group.add_argument("--warmup-steps", type=int, metavar="K", help="of the schedule")
    group.add_argument("--state-copies", type=float, metavar="C", help="default: 2, as Adam has")
    group.add_argument(
        "--activation-mib", type=float, default=0.0, metavar="M", help="of a sample, in backward"
    )
    group.add_argument("--time", metavar="T", help="walltime: 2h30m, 02:30:00")
    group.add_argument("--requeue", type=int, default=0, metavar="N", help="restarts")
    group.add_argument("--save-dir", type=Path, metavar="D", help="where checkpoints would go")
    group.add_argument("--keep", type=int, default=3, metavar="K", help="checkpoints to keep")
    group.add_argument("--site", metavar="S", help="show the job script for this site")


def main(args: argparse.Namespace) -> int:
    """List, measure, rehearse, plan grids or predict."""
    if args.machines:
        return print_list(as_json=args.json)
    _check_rehearsal(args)
    check_sizing(args)
    take_config(args)
    if args.memory:
        return print_grids(args)
    if args.measure_profile:
        return _measure(args)
    if args.rehearse:
        from hpctrain.cli.plan.rehearsing import print_rehearsal

        return print_rehearsal(args)
    check_given(args)
    machine, counts = machine_from(args), parse_ranks(args.ranks)
    for count in counts:
        check_ranks(args, machine, count)
    profile = profile_from(args)
    predictions = [predict_from(args, profile, machine, count) for count in counts]
    print_plan(args, profile, machine, predictions)
    return 0


def _check_rehearsal(args: argparse.Namespace) -> None:
    """Options of a rehearsal would do nothing without one, and an epoch at least is rehearsed."""
    if args.epochs is not None and args.epochs < 1:
        raise ConfigError(f"--epochs {args.epochs} must be at least 1")
    named = ("samples", "epochs", "warmup_steps", "state_copies", "time", "save_dir", "site")
    given = [name for name in named if getattr(args, name) is not None]
    if given and not args.rehearse:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            f"{options} is for a rehearsal; add --rehearse (for hours and node-hours of a "
            "prediction give --train-samples)"
        )


def _measure(args: argparse.Namespace) -> int:
    if not args.subject and not args.config:
        raise ConfigError("--measure-profile needs CONFIG.toml or --subject FILE.py:NAME")
    if args.subject:
        from hpctrain.predict import load_subject, measure_profile

        subject = load_subject(args.subject)

        profile = measure_profile(subject, repeats=args.repeats)
    else:
        profile = profile_from(args)
    write_profile(profile, args.measure_profile)
    log.notice(
        f"{profile.model}: {len(profile.layers)} gradients, {profile.gradient_bytes / 1e6:.1f} MB, "
        f"forward {1000 * profile.forward_s:.2f} ms, backward {1000 * profile.backward_s:.2f} ms; "
        f"written to {args.measure_profile}"
    )
    return 0
