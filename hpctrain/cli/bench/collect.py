"""`hpctrain bench collect`: a sweep's result so far."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from hpctrain import log
from hpctrain.bench import Folder, collect_jobs
from hpctrain.cli.bench.options import add_output, conclude
from hpctrain.errors import ConfigError

__all__ = ["add_arguments", "main"]

_POLL_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("dir", type=Path, metavar="DIR", help="of the sweep")
    parser.add_argument(
        "--wait", type=float, metavar="S", help="seconds to wait until all jobs have ended"
    )
    add_output(parser)


def main(args: argparse.Namespace) -> int:
    """Query the jobs, and show the results so far."""
    folder = Folder(args.dir)
    sweep = folder.open()
    if (args.dir / "jobs.json").exists():
        deadline = time.monotonic() + (args.wait or 0.0)
        left = collect_jobs(folder, sweep, say=log.notice)
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = collect_jobs(folder, sweep, say=log.notice)
        if left:
            log.notice(f"{left} launches are still queued or running")
    elif args.wait is not None:
        raise ConfigError(f"{args.dir} has no jobs to wait for; leave --wait out")
    return conclude(args, folder, sweep)[0]
