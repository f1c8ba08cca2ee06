"""`hpctrain job cancel`: end jobs."""

from __future__ import annotations

import argparse

from hpctrain.cli.job.known import add_job, meant
from hpctrain.errors import ConfigError
from hpctrain.submit.batch import find_system
from hpctrain.submit.batch.system import ask_program

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the ids."""
    add_job(parser, several=True)


def main(args: argparse.Namespace) -> int:
    """Cancel each."""
    if not args.jobs:
        raise ConfigError("no job was named; `hpctrain job status` lists them")
    for job in args.jobs:
        entry = meant(job)
        find_system(entry.batch).cancel(job, ask_program)
        print(f"{job} cancelled")
    return 0
