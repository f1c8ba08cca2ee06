"""`hpctrain job submit`: the script goes to the batch system, and is remembered."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from hpctrain import log
from hpctrain.batch_systems import Refused
from hpctrain.cli.job.options import (
    add_job_options,
    add_snapshot,
    command_of,
    job_from,
    snapshot_for,
)
from hpctrain.errors import ConfigError, JobError
from hpctrain.submit import Ledger, Request, make_plan, state_home, submit

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "hpctrain job submit [options] -- COMMAND [ARGS ...]"
    add_job_options(parser)
    add_snapshot(parser)
    parser.add_argument(
        "--chain", type=int, default=1, metavar="N", help="N such jobs, each after the one before"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show the script")
    parser.add_argument("--json", action="store_true", help="print the ids as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Submit, and print the ids."""
    if not 1 <= args.chain <= 1000:
        raise ConfigError(f"--chain {args.chain} is not possible; give 1 to 1000")
    request, site = job_from(args, (command_of(args.command),))
    if args.chain > 1:  # check the second before the first is submitted
        make_plan(dataclasses.replace(request, after=("1",), script="to be named"), site)
    _warn_of_absent(request)
    ledger = Ledger(state_home(os.environ))
    jobs: list[str] = []
    show = _keep_quiet if args.quiet else _show
    try:
        with snapshot_for(request, args) as job:  # one copy for all of a chain
            for _ in range(args.chain):
                try:
                    new = submit(
                        job,
                        site,
                        directory=Path.cwd(),
                        ledger=ledger,
                        show=show,
                        tell=jobs.append,
                    )
                except Refused as error:
                    if jobs:  # those before need their copy of the code
                        raise JobError(str(error)) from error
                    raise
                job = dataclasses.replace(job, after=tuple(new))
    finally:  # what was submitted before something failed is in the queue
        _print(jobs, args)
    return 0


def _print(jobs: list[str], args: argparse.Namespace) -> None:
    if args.json and jobs:
        print(json.dumps({"jobs": jobs}))
    elif jobs:
        print("\n".join(jobs))
        log.notice(f"`hpctrain job logs -f {jobs[0]}` follows it; scripts and logs: {args.log_dir}")


def _warn_of_absent(request: Request) -> None:
    """Name files that are not here: after hours in a queue the job would end at them."""
    named = (*request.stage, *request.source, request.pack, request.venv, request.image)
    for path in named:
        if path is not None and "://" not in path and not Path(path).exists():
            log.warn(f"{path} is not here; a job that does not find it on its nodes fails at once")


def _show(text: str) -> None:
    print(text, file=sys.stderr)


def _keep_quiet(text: str) -> None:
    pass
