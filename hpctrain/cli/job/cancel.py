"""`hpctrain job cancel`: end jobs."""

from __future__ import annotations

import argparse

from hpctrain.batch_systems import ask_program, find_system
from hpctrain.cli.job.known import add_job, meant
from hpctrain.errors import ConfigError
from hpctrain.submit import ask_states, is_over, runs_of

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the ids."""
    add_job(parser, several=True)


def main(args: argparse.Namespace) -> int:
    """Cancel each that still waits or runs, or its restart."""
    if not args.jobs:
        raise ConfigError("no job was named; `hpctrain job status` lists them")
    for job in args.jobs:
        entry = meant(job)
        newest = runs_of(entry)[-1].job
        target = job if newest == entry.job else newest
        states = ask_states(entry, ask_program, job=job)
        if is_over(states):
            how = ", ".join(sorted({state.state for state in states}))
            print(f"{job} has ended already ({how}); nothing was cancelled")
            continue
        find_system(entry.batch).cancel(target, ask_program)
        print(f"{target} cancelled" if target == job else f"{target}, its restart, cancelled")
    return 0
