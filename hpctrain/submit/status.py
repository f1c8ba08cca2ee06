"""How a submitted job is doing: its state, its restarts and its logs.

The batch system is queried first; if it no longer has the job, the end of the job's log is used.
PBS and Flux restart a job as a new one, whose id only the log of the one before has.
"""

from __future__ import annotations

import codecs
import dataclasses
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.batch_systems import Ask, JobState, find_system
from hpctrain.errors import ConfigError, JobError
from hpctrain.exit_codes import REQUEUE
from hpctrain.submit.ledger import SubmittedJob, split_task

__all__ = [
    "LogEnd",
    "ask_states",
    "follow",
    "is_over",
    "last_lines",
    "log_paths",
    "read_end",
    "runs_of",
]

_POLL_S = 0.5
_ASK_EVERY_S = 5.0
_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 18
_MOST_RUNS = 1001
_ENDED = re.compile(r"^hpctrain job: exit code (\d+) after (\d+) s$", re.MULTILINE)
_STARTED = re.compile(r"^hpctrain job: .*, restart \d+ of at most \d+$", re.MULTILINE)
_REFUSED = re.compile(r"^hpctrain job: not run again", re.MULTILINE)
_REQUEUED = re.compile(r"^hpctrain job: requeued for restart", re.MULTILINE)
_NEXT = re.compile(r"^hpctrain job: restart \d+ of \d+ is ([A-Za-z0-9ƒ][\w.\[\]-]*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEnd:
    """What the end of a log says of its job."""

    exit_code: int | None = None
    """None: the job has not ended, or was killed with its script."""
    elapsed_s: int | None = None
    next_job: str | None = None
    """The id of its restart, where that is another job."""


def read_end(text: str) -> LogEnd:
    """Read the lines that a job script ends with. Pure."""
    starts = list(_STARTED.finditer(text))
    last = text[starts[-1].end() :] if starts else text  # a requeued job appends to its log
    ends = list(_ENDED.finditer(last))
    if not ends:
        return LogEnd()
    code, elapsed_s = int(ends[-1][1]), int(ends[-1][2])
    rest = last[ends[-1].end() :]
    if following := _NEXT.search(rest):
        return LogEnd(exit_code=code, elapsed_s=elapsed_s, next_job=following[1])
    if _REQUEUED.search(rest):
        return LogEnd()
    if code == REQUEUE and _REFUSED.search(rest):
        code = 1  # as the script ends then
    return LogEnd(exit_code=code, elapsed_s=elapsed_s)


def runs_of(entry: SubmittedJob) -> list[SubmittedJob]:
    """The job and its restarts that are separate jobs, the newest last."""
    runs = [entry]
    while entry.array_size is None and len(runs) < _MOST_RUNS:
        following = read_end(_tail(log_paths(runs[-1])[0])).next_job
        if following is None or any(run.job == following for run in runs):
            break
        runs.append(dataclasses.replace(entry, job=following))
    return runs


def ask_states(entry: SubmittedJob, ask: Ask, *, job: str | None = None) -> list[JobState]:
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
        states = _by_log(newest, job if job and split_task(entry, job)[1] is not None else None)
    if restarts:
        states = [dataclasses.replace(state, restarts=restarts) for state in states]
    return states


def is_over(states: Sequence[JobState]) -> bool:
    """Whether a job has ended, as far as that is known."""
    return bool(states) and all(state.is_final for state in states)


def _by_log(entry: SubmittedJob, job: str | None) -> list[JobState]:
    paths = log_paths(entry, job=job)
    if len(paths) == 1:
        return [_state(entry, paths[0], job or entry.job)]
    task_id = find_system(entry.batch).task_id
    return [_state(entry, path, task_id(entry.job, task)) for task, path in enumerate(paths)]


def _state(entry: SubmittedJob, path: Path, job: str) -> JobState:
    told = read_end(_tail(path))
    if told.exit_code is None:
        why = "the batch system no longer lists it, and its log has no exit code"
        return JobState(job=job, name=entry.name, state="UNKNOWN", reason=why)
    return JobState(
        job=job,
        name=entry.name,
        state="COMPLETED" if told.exit_code == 0 else "FAILED",
        exit_code=told.exit_code,
        elapsed=f"{told.elapsed_s} s",
        reason="by its log; the batch system no longer lists it",
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


def log_paths(
    entry: SubmittedJob, task: int | None = None, *, job: str | None = None
) -> list[Path]:
    """The logs of a job; of an array all tasks, unless one is named.

    Args:
        entry: The job.
        task: The task, counted from 0.
        job: What the user called it: the id of one task of an array means that task.

    Raises:
        ConfigError: it has no such task.
    """
    system = find_system(entry.batch)
    index = split_task(entry, job)[1] if job and job != entry.job else None
    if task is None and index is not None:
        task = index - system.first_index
    count = entry.array_size
    if task is not None and (count is None or not 0 <= task < count):
        has = "is not an array" if count is None else f"has tasks 0 to {count - 1}"
        raise ConfigError(f"job {entry.job} {has}; there is no task {task}")
    tasks = [task] if task is not None or count is None else list(range(count))
    return [Path(entry.log_dir) / system.log_name(entry.name, entry.job, each) for each in tasks]


def last_lines(path: Path, count: int | None) -> str:
    """The end of a log, or all of it.

    Raises:
        JobError: there is no such log yet.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise JobError(
            f"{path} cannot be read ({error.strerror}); the job may not have started: "
            "check `hpctrain job status`"
        ) from error
    lines = text.splitlines(keepends=True)
    return "".join(lines if count is None else lines[max(0, len(lines) - count) :])


def follow(entry: SubmittedJob, path: Path, write: Callable[[str], None], ask: Ask) -> None:
    """Write what a log has and gets, until the job is over.

    A job that the batch system does not list is over as well; it is queried twice, because a
    controller that is being restarted has no record either.
    """
    system, position, over, unknown = find_system(entry.batch), 0, False, 0
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    asked = time.monotonic() - _ASK_EVERY_S
    while True:
        if not over and time.monotonic() - asked >= _ASK_EVERY_S:
            asked = time.monotonic()
            states = system.ask_state(entry.job, ask)
            unknown = 0 if states else unknown + 1
            over = unknown > 1 or (bool(states) and all(state.is_final for state in states))
        if grown := _read_from(path, position):
            position += len(grown)
            write(decode(grown))
        elif over:  # queried before the last check: nothing can follow
            return
        else:
            time.sleep(_POLL_S)


def _read_from(path: Path, position: int) -> bytes:
    try:
        with path.open("rb") as log:
            log.seek(position)
            return log.read(_CHUNK_BYTES)
    except OSError:
        return b""
