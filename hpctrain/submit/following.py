"""A job's log: where it is, its end, and what is added to it until the job is over."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.errors import ConfigError, JobError
from hpctrain.submit.batch import find_system
from hpctrain.submit.batch.system import Ask
from hpctrain.submit.ledger import Entry, split_task

__all__ = ["follow", "last_lines", "log_paths"]

_POLL_S = 0.5
_ASK_EVERY_S = 5.0
_CHUNK_BYTES = 1 << 16


def log_paths(entry: Entry, task: int | None = None, *, job: str | None = None) -> list[Path]:
    """The logs of a job; of an array all tasks, unless one is named.

    Args:
        entry: The job.
        task: The task, counted from 0.
        job: What the user called it: the id of one task of an array means that task.

    Raises:
        ConfigError: it has no such task.
    """
    system = find_system(entry.batch)
    index = split_task(job)[1] if job and job != entry.job else None
    if task is None and index is not None:
        task = index - system.first_index
    count = entry.array_size
    if task is not None and (count is None or not 0 <= task < count):
        has = "is no array" if count is None else f"has tasks 0 to {count - 1}"
        raise ConfigError(f"job {entry.job} {has}; task {task} is none of it")
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
            "`hpctrain job status` tells"
        ) from error
    lines = text.splitlines(keepends=True)
    return "".join(lines if count is None else lines[max(0, len(lines) - count) :])


def follow(entry: Entry, path: Path, write: Callable[[str], None], ask: Ask) -> None:
    """Write what a log has and gets, until the job is over.

    A job that the batch system does not know is over as well; it is asked twice, because a
    controller that is being restarted knows nothing either.
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
        elif over:  # asked before the last look: nothing can come any more
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
