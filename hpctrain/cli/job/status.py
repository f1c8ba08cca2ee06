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
    entries = [meant(job) for job in args.jobs] if args.jobs else recent(_SHOWN)
    states = [state for entry in entries for state in _ask(entry)]
    if args.json:
        print(json.dumps([dataclasses.asdict(state) for state in states], indent=2))
        return 0
    if not states:
        print("no jobs were submitted yet")
        return 0
    headers = ("job", "name", "state", "exit", "elapsed", "restarts", "")
    print(log.table(headers, [_row(state) for state in states]))
    return 0


def _ask(entry: Entry) -> list[JobState]:
    states = find_system(entry.batch).ask_state(entry.job, ask_program)
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
