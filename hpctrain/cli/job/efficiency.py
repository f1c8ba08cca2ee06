"""`hpctrain job efficiency`: what jobs used of what they requested."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from hpctrain import log
from hpctrain.batch_systems import JobUse, all_systems, ask_program, find_system
from hpctrain.cli.job.known import add_job, meant
from hpctrain.errors import JobError
from hpctrain.submit import (
    Ledger,
    advise_request,
    check_job_id,
    find_summaries,
    read_used,
    state_home,
)

__all__ = ["add_arguments", "main"]

_MORE = """\
For any job, Slurm's accounting is queried. Where there is none, what `hpctrain train` or the
Trainer left in the job's run directory is shown: give it with --run if it is not found.

examples:
  hpctrain job efficiency
  hpctrain job efficiency 4711 --json
  hpctrain job efficiency --run runs/one
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _MORE
    add_job(parser, several=False)
    parser.add_argument("--run", type=Path, metavar="DIR", help="the job's run directory")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def main(args: argparse.Namespace) -> int:
    """Query, show, and advise."""
    uses = _of_run(args.run) if args.run is not None else _of_job(args.jobs)
    if args.json:
        rows = [
            {**asdict(use), "shares": use.shares(), "advice": advise_request(use)} for use in uses
        ]
        print(json.dumps(rows, indent=2))
        return 0
    for use in uses:
        title = f"job {use.job}, {use.state}, {use.num_nodes} node{'s' * (use.num_nodes > 1)}"
        headers = ("", "used", "asked for", "share")
        print(log.table(headers, use.rows(), title=f"{title} (by {use.source})"))
        for line in advise_request(use) or ["The request matches what was used."]:
            print(line)
    return 0


def _of_run(directory: Path) -> list[JobUse]:
    used = read_used(directory / "summary.json")
    if used is None:
        raise JobError(
            f"{directory}/summary.json does not record what the run used; it does once a run of "
            "`hpctrain train` or of the Trainer has finished"
        )
    return [used]


def _of_job(job: str | None) -> list[JobUse]:
    if job is not None:
        check_job_id(job)
    entry = Ledger(state_home(os.environ)).find(job) if job is not None else meant(None)
    wanted = job or (entry.job if entry is not None else "")
    reasons = []
    accounted = [system for system in all_systems() if system.has_accounting]
    for system in accounted if entry is None else [find_system(entry.batch)]:
        uses, why = system.ask_use(wanted, ask_program)
        if uses:
            return uses
        reasons += [why] if why else []
    paths = [] if entry is None else find_summaries(Path(entry.directory), wanted)
    found = [use for path in paths if (use := read_used(path)) is not None]
    if not found:
        raise JobError(
            f"no record of what job {wanted} used: {', '.join(reasons)}, and no summary.json of "
            "a finished run has this job's id; name its run directory with --run"
        )
    return found[-1:]
