"""`hpctrain job status`: how jobs are doing, by the batch system's own word."""

from __future__ import annotations

import argparse
import dataclasses
import json

from hpctrain import log
from hpctrain.batch_systems import JobState, ask_program
from hpctrain.cli.job.known import add_job, meant, recent
from hpctrain.submit import ask_states

__all__ = ["add_arguments", "main"]

_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser, several=True)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def main(args: argparse.Namespace) -> int:
    """Query and show."""
    named = [(meant(job), job) for job in args.jobs]
    wanted = named or [(entry, entry.job) for entry in recent(_SHOWN)]
    states = [state for entry, job in wanted for state in ask_states(entry, ask_program, job=job)]
    if args.json:
        print(json.dumps([dataclasses.asdict(state) for state in states], indent=2))
        return 0
    if not states:
        print("no jobs were submitted yet")
        return 0
    headers = ("job", "name", "state", "exit", "elapsed", "restarts", "")
    print(log.table(headers, [_row(state) for state in states]))
    return 0


def _row(state: JobState) -> list[object]:
    code = "" if state.exit_code is None or not state.is_final else state.exit_code
    restarts = "" if state.restarts is None else state.restarts
    return [state.job, state.name, state.state, code, state.elapsed, restarts, state.reason]
