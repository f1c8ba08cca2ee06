"""Which job is meant: an id that was remembered, or any id with its batch system."""

from __future__ import annotations

import argparse
import os

from hpctrain.errors import JobError
from hpctrain.submit import Ledger, SubmittedJob, check_job_id, state_home

__all__ = ["add_job", "meant", "recent"]


def add_job(parser: argparse.ArgumentParser, *, several: bool) -> None:
    """Declare the ids."""
    parser.add_argument("jobs", nargs="*" if several else "?", metavar="ID", help="job id")


def recent(count: int) -> list[SubmittedJob]:
    """The last jobs that were submitted from here, newest last."""
    return Ledger(state_home(os.environ)).entries()[-count:]


def meant(job: str | None) -> SubmittedJob:
    """The entry of an id; without one, the last job.

    Raises:
        JobError: hpctrain did not submit such a job.
    """
    if job is not None:
        check_job_id(job)
    ledger = Ledger(state_home(os.environ))
    entry = ledger.find(job)
    if entry is None:
        what = f"job {job}" if job else "any job"
        raise JobError(
            f"hpctrain has no record of {what} ({ledger.path}); it records only what `hpctrain "
            "job submit` submitted; for other jobs, query the batch system"
        )
    return entry
