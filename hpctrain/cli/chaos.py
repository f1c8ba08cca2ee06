"""`hpctrain chaos`: disturb a training in every way it must survive."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from hpctrain.errors import ConfigError

__all__ = ["add_arguments", "main"]

_MORE = """\
`run` trains a short copy of a configuration of `hpctrain train` in a scratch folder, disturbs it
once for each scenario, restarts it each time, and compares its last weights with those of an
undisturbed run. `soak` kills a small built-in training at random moments.

examples:
  hpctrain chaos run train.toml -n 4
  hpctrain chaos run train.toml -n 2 --scenarios kill,disk
  hpctrain chaos soak --rounds 20

exit codes: 0 all as expected; 1 something failed; 2 the command line or a setting is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    from hpctrain.chaos import SCENARIOS

    parser.epilog = _MORE
    kinds = parser.add_subparsers(dest="kind", metavar="run|soak", required=True)
    run = kinds.add_parser("run", help="every scenario, on your configuration")
    run.add_argument("config", type=Path, metavar="CONFIG.toml", help="what to train")
    run.add_argument("--scenarios", metavar="A,B", help=f"which (all): {', '.join(SCENARIOS)}")
    run.add_argument("-n", "--ranks", type=int, default=2, metavar="N", help="ranks (default: 2)")
    run.add_argument(
        "--steps", type=int, metavar="K", help="steps of the training (default: enough)"
    )
    run.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
        help="replace a key of the file",
    )  # fmt: skip
    run.add_argument(
        "--tolerance", type=float, default=0.0, metavar="T",
        help="largest relative difference of weights at the end (default: 0, bit for bit)",
    )  # fmt: skip
    run.add_argument(
        "--timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for one launch (default: 600)",
    )
    soak = kinds.add_parser("soak", help="kill a small training at random moments")
    soak.add_argument("--rounds", type=int, default=20, metavar="R", help="kills (default: 20)")
    soak.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (default: 0)")
    soak.add_argument(
        "-n",
        "--ranks",
        type=int,
        metavar="N",
        help="ranks of every attempt (default: each has 1 to 4)",
    )
    for child in (run, soak):
        child.add_argument("--keep", type=Path, metavar="DIR", help="keep all files there")
        child.add_argument("--json", action="store_true", help="the result as JSON")


def main(args: argparse.Namespace) -> int:
    """Disturb, and say how it went."""
    if args.keep is not None and args.keep.exists() and any(args.keep.iterdir()):
        raise ConfigError(f"--keep {args.keep} is not empty; name another folder")
    made = args.keep is None
    scratch = Path(tempfile.mkdtemp(prefix="hpctrain-chaos-")) if made else args.keep.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    good = False
    # Ending this ends what it started, too, and removes its small disk.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        good = (_run if args.kind == "run" else _soak)(args, scratch)
    finally:
        signal.signal(signal.SIGTERM, before)
        if made and good:
            shutil.rmtree(scratch, ignore_errors=True)
        elif not args.json:
            print(f"everything that was written is in {scratch}")
    return 0 if good else 1


def _run(args: argparse.Namespace, scratch: Path) -> bool:
    from hpctrain.chaos import Chain, choose, render_rows, steps_for

    scenarios = choose(args.scenarios.split(",") if args.scenarios else None)
    num_steps = args.steps or steps_for(len(scenarios))
    if args.ranks < 2:
        raise ConfigError(
            f"-n {args.ranks}: a scenario disturbs one rank of several; give at least 2"
        )
    if num_steps < steps_for(len(scenarios)):
        raise ConfigError(
            f"--steps {num_steps} is too short for {len(scenarios)} scenarios; give at least "
            f"{steps_for(len(scenarios))}"
        )
    chain = Chain(
        args.config,
        scratch,
        num_ranks=args.ranks,
        settings=args.settings,
        num_steps=num_steps,
        timeout_s=args.timeout_s,
        tolerance=args.tolerance,
        tell=lambda row: None if args.json else print(f"{row.name}: {row.happened}", flush=True),
    )
    rows = chain.run(scenarios)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print("", render_rows(rows), sep="\n")
    return all(row.good for row in rows)


def _soak(args: argparse.Namespace, scratch: Path) -> bool:
    from hpctrain.chaos import Round, Soak, describe_outcome, describe_round

    if args.rounds < 1 or (args.ranks is not None and args.ranks < 1):
        raise ConfigError(f"--rounds {args.rounds} -n {args.ranks}: give at least 1 of each")

    def tell(one: Round) -> None:
        if not args.json:
            print(describe_round(one), flush=True)

    soak = Soak(scratch, num_rounds=args.rounds, seed=args.seed, ranks=args.ranks, tell=tell)
    outcome = soak.run()
    print(json.dumps(outcome.as_json(), indent=1) if args.json else describe_outcome(outcome))
    return outcome.good
