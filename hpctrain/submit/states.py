"""How a job is doing: the batch system's word, and where it has forgotten the job, its log's.

PBS and Flux restart a job as a new one, whose id only the log of the one before has.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.exit_codes import REQUEUE
from hpctrain.submit.batch import JobState, find_system
from hpctrain.submit.batch.system import Ask
from hpctrain.submit.following import log_paths
from hpctrain.submit.ledger import Entry, split_task

__all__ = ["Told", "ask_states", "is_over", "read_end", "runs_of"]

_TAIL_BYTES = 1 << 18
_MOST_RUNS = 1001
_ENDED = re.compile(r"^hpctrain job: exit code (\d+) after (\d+) s$", re.MULTILINE)
_STARTED = re.compile(r"^hpctrain job: .*, restart \d+ of at most \d+$", re.MULTILINE)
_REFUSED = re.compile(r"^hpctrain job: not run again", re.MULTILINE)
_REQUEUED = re.compile(r"^hpctrain job: requeued for restart", re.MULTILINE)
_NEXT = re.compile(r"^hpctrain job: restart \d+ of \d+ is ([A-Za-z0-9ƒ][\w.\[\]-]*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What the end of a log says of its job."""

    exit_code: int | None = None
    """None: the job has not come to its end, or was killed with its script."""
    elapsed_s: int | None = None
    next_job: str | None = None
    """The id of its restart, where that is another job."""


def read_end(text: str) -> Told:
    """Read the lines that a job script ends with. Pure."""
    starts = list(_STARTED.finditer(text))
    last = text[starts[-1].end() :] if starts else text  # a requeued job appends to its log
    ends = list(_ENDED.finditer(last))
    if not ends:
        return Told()
    code, elapsed_s = int(ends[-1][1]), int(ends[-1][2])
    rest = last[ends[-1].end() :]
    if following := _NEXT.search(rest):
        return Told(exit_code=code, elapsed_s=elapsed_s, next_job=following[1])
    if _REQUEUED.search(rest):
        return Told()
    if code == REQUEUE and _REFUSED.search(rest):
        code = 1  # as the script ends then
    return Told(exit_code=code, elapsed_s=elapsed_s)


def runs_of(entry: Entry) -> list[Entry]:
    """The job and its restarts that are jobs of their own, the newest last."""
    runs = [entry]
    while entry.array_size is None and len(runs) < _MOST_RUNS:
        following = read_end(_tail(log_paths(runs[-1])[0])).next_job
        if following is None or any(run.job == following for run in runs):
            break
        runs.append(dataclasses.replace(entry, job=following))
    return runs


def ask_states(entry: Entry, ask: Ask, *, job: str | None = None) -> list[JobState]:
    """The states of a job, or of its newest restart; of an array, of each task.

    Args:
        entry: The job.
        ask: Runs the batch system's programs.
        job: What the user called it: the id of one task of an array means that task.
    """
    runs = runs_of(entry)
    newest, restarts = runs[-1], len(runs) - 1
    states = find_system(entry.batch).ask_state(newest.job, ask)
    states = [state for state in states if state.job == job] or states
    if not states:
        states = _by_log(newest, job if job and split_task(job)[1] is not None else None)
    if restarts:
        states = [dataclasses.replace(state, restarts=restarts) for state in states]
    return states


def is_over(states: Sequence[JobState]) -> bool:
    """Whether nothing of a job will run any more, as far as that is known."""
    return bool(states) and all(state.is_final for state in states)


def _by_log(entry: Entry, job: str | None) -> list[JobState]:
    paths = log_paths(entry, job=job)
    if len(paths) == 1:
        return [_state(entry, paths[0], job or entry.job)]
    task_id = find_system(entry.batch).task_id
    return [_state(entry, path, task_id(entry.job, task)) for task, path in enumerate(paths)]


def _state(entry: Entry, path: Path, job: str) -> JobState:
    told = read_end(_tail(path))
    if told.exit_code is None:
        why = "the batch system does not know it any more, and its log has no exit code"
        return JobState(job=job, name=entry.name, state="UNKNOWN", reason=why)
    return JobState(
        job=job,
        name=entry.name,
        state="COMPLETED" if told.exit_code == 0 else "FAILED",
        exit_code=told.exit_code,
        elapsed=f"{told.elapsed_s} s",
        reason="by its log; the batch system does not know it any more",
        log=str(path),
    )


def _tail(path: Path) -> str:
    """The end of a log, from the beginning of a line; "" where there is none yet."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            data = log.read(_TAIL_BYTES)
    except OSError:
        return ""
    return data.decode("utf-8", errors="replace")
