"""`hpctrain train`: a training from a TOML file, under the launcher that is there or mpirun."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.cli.starting import (
    AUTO,
    add_variables,
    choose_layout,
    ranks_or_auto,
    set_variables,
    warn_of_shared_gpus,
)
from hpctrain.errors import ConfigError

__all__ = ["add_arguments", "main"]

_MORE = """\
Outside a launcher, -n N starts the ranks; under mpirun, mpiexec or srun the training is only run.
A run whose directory has checkpoints resumes from the newest.

examples:
  hpctrain train digits.toml -n 2
  hpctrain train digits.toml --set train.epochs=3 --set optimizer.lr=0.01
  hpctrain train digits.toml -n 64 --ranks-per-node 8 --dry-run
  srun hpctrain train digits.toml

exit codes: 0 finished; 75 saved, run it again (a signal, or the end of the allocation);
2 refused before the first step: the configuration is wrong, or does not fit the checkpoints in the
run directory; otherwise the code of the rank that failed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.epilog = _MORE
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="what to train, and how")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a key of the file, as in train.epochs=3",
    )
    parser.add_argument(
        "-n",
        "--ranks",
        type=ranks_or_auto,
        metavar="N",
        help="ranks to start (default: 1); auto: what `bench layout` found",
    )
    parser.add_argument("--hosts", metavar="A:4,B:4", help="hosts and their ranks")
    add_variables(parser)
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume", action="store_true", help="fail if there is no checkpoint to resume from"
    )
    start.add_argument(
        "--fresh",
        action="store_true",
        help="start from scratch; an existing run directory is moved aside",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan for -n ranks, without training"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="M",
        help="ranks per node in the plan (default: all on one node)",
    )
    parser.add_argument("--json", action="store_true", help="the plan as JSON")


def main(args: argparse.Namespace) -> int:
    """Plan, start the ranks, or be one."""
    from hpctrain.train import load_config
    from hpctrain.world import detect

    variables = set_variables(args.env)
    config = load_config(args.config, args.settings)  # report mistakes before anything starts
    if args.json and not args.dry_run:
        raise ConfigError(
            "--json belongs to --dry-run; a run writes metrics.jsonl and summary.json"
        )
    if args.ranks_per_node is not None and not args.dry_run:
        raise ConfigError("--ranks-per-node belongs to --dry-run; --hosts says where ranks start")
    launch = detect(os.environ)
    started = launch.row is not None and launch.row.starts_mpi
    if args.ranks == AUTO:
        if started or args.hosts:
            raise ConfigError("-n auto is for this machine only; leave it to the launcher")
        words = [word for text in args.settings for word in ("--set", text)]
        key = str(args.config.resolve())
        args.ranks, chosen = choose_layout(key, words, os.environ)
        os.environ.update(chosen)
    if args.ranks is not None and args.ranks < 1:
        raise ConfigError(f"-n {args.ranks} is not possible; start at least 1 rank")
    if args.dry_run:
        from hpctrain.train import plan_ahead, search_beside

        search_beside(args.config)
        num_ranks = args.ranks or (launch.size if started else 1)
        plan = plan_ahead(
            config,
            args.config.resolve().parent,
            num_ranks=num_ranks,
            ranks_per_node=args.ranks_per_node
            or (launch.local_size if started else 0)
            or num_ranks,
        )
        if launch.rank == 0:
            print(json.dumps(plan.as_json(), indent=1) if args.json else plan.describe())
        return 0
    return _train(args, variables, wants_gpus=config.train.device != "cpu")


def _train(args: argparse.Namespace, variables: Sequence[str], *, wants_gpus: bool) -> int:
    from hpctrain.launch import Program, parse_hosts, run_here, start
    from hpctrain.world import detect

    words = [str(args.config), *(word for text in args.settings for word in ("--set", text))]
    words += ["--resume"] if args.resume else ["--fresh"] if args.fresh else []
    program = Program(target="hpctrain.train.entry", is_module=True, arguments=tuple(words))
    environ = dict(os.environ)
    launch = detect(environ)
    if launch.row is not None and launch.row.starts_mpi:
        if args.ranks not in (None, launch.size) or args.hosts:
            raise ConfigError(
                f"this is already rank {launch.rank} of {launch.size}, started by {launch.title}; "
                "leave -n and --hosts to the launcher"
            )
        return run_here(program, launch, environ, log_dir=None)
    hosts = parse_hosts(args.hosts) if args.hosts else None
    num_ranks = args.ranks or (hosts.num_ranks if hosts else 1)
    if num_ranks == 1 and hosts is None:
        if sys.stdout.isatty():  # output goes through a pipe to the log file from here on
            os.environ["HPCTRAIN_COLUMNS"] = str(shutil.get_terminal_size().columns)
        return run_here(program, detect(os.environ), environ, log_dir=None)
    if hosts and num_ranks > hosts.num_ranks:
        raise ConfigError(
            f"-n {num_ranks} is more than the {hosts.num_ranks} ranks of {hosts}; give the hosts "
            "more, as in host:4, or lower -n"
        )
    if hosts is None and wants_gpus:
        warn_of_shared_gpus(num_ranks, environ, ["hpctrain", "train", *words], [])
    return start(program, environ, num_ranks=num_ranks, hosts=hosts, variables=variables)
