"""`hpctrain job logs`: what a job has printed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hpctrain import log
from hpctrain.batch_systems import ask_program
from hpctrain.cli.job.known import add_job, meant
from hpctrain.errors import ConfigError
from hpctrain.submit import SubmittedJob, follow, last_lines, log_paths, runs_of

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser, several=False)
    parser.add_argument("-f", "--follow", action="store_true", help="until the job is over")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="only the last N lines")
    parser.add_argument("--task", type=int, metavar="I", help="one task of an array, from 0")


def main(args: argparse.Namespace) -> int:
    """Show the log, or follow it."""
    if args.lines is not None and args.lines < 0:
        raise ConfigError(f"--lines {args.lines} is not possible; give 0 or more")
    entry = meant(args.jobs)
    paths = log_paths(entry, args.task, job=args.jobs)
    if args.follow:
        if len(paths) > 1:
            raise ConfigError(f"job {entry.job} is an array; name one task with --task")
        try:
            _follow(entry, paths[0])
        except KeyboardInterrupt:
            log.notice(f"job {entry.job} is still running")
        return 0
    if len(paths) == 1:  # a restart that is a job of its own has a log of its own
        paths = [*paths, *(log_paths(run)[0] for run in runs_of(entry)[1:])]
    if len(paths) == 1:
        _write(last_lines(paths[0], args.lines))
        return 0
    for path in paths:
        print(f"==> {path} <==")
        if path.exists():
            _write(last_lines(path, args.lines))
        else:
            print("(there is no log yet)")
    return 0


def _follow(entry: SubmittedJob, path: Path) -> None:
    """Follow a job, then each restart of it that is a job of its own."""
    follow(entry, path, _write, ask_program)
    followed = 1
    while len(runs := runs_of(entry)) > followed:
        follow(runs[followed], log_paths(runs[followed])[0], _write, ask_program)
        followed += 1


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
