"""`hpctrain job status`: how jobs are doing, by the batch system's own word."""

from __future__ import annotations

import argparse
import dataclasses
import json

from hpctrain import log
from hpctrain.cli.job.known import add_job, meant, recent
from hpctrain.submit.batch import JobState, find_system
from hpctrain.submit.batch.system import ask_program
from hpctrain.submit.ledger import Entry

__all__ = ["add_arguments", "main"]

_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser, several=True)
    parser.add_argument("--json", action="store_true", help="print what is known as JSON")


def main(args: argparse.Namespace) -> int:
    """Ask and show."""
    named = [(meant(job), job) for job in args.jobs]
    wanted = named or [(entry, entry.job) for entry in recent(_SHOWN)]
    states = [state for entry, job in wanted for state in _ask(entry, job)]
    if args.json:
        print(json.dumps([dataclasses.asdict(state) for state in states], indent=2))
        return 0
    if not states:
        print("no jobs were submitted yet")
        return 0
    headers = ("job", "name", "state", "exit", "elapsed", "restarts", "")
    print(log.table(headers, [_row(state) for state in states]))
    return 0


def _ask(entry: Entry, job: str) -> list[JobState]:
    """The job, with all its tasks where it is an array, or the one task that was named."""
    states = find_system(entry.batch).ask_state(entry.job, ask_program)
    states = [state for state in states if state.job == job] or states
    gone = JobState(
        job=entry.job,
        name=entry.name,
        state="UNKNOWN",
        reason="the batch system does not know it any more; `hpctrain job logs` has its output",
    )
    return states or [gone]


def _row(state: JobState) -> list[object]:
    code = "" if state.exit_code is None or not state.is_final else state.exit_code
    restarts = "" if state.restarts is None else state.restarts
    return [state.job, state.name, state.state, code, state.elapsed, restarts, state.reason]
