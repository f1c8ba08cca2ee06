"""The jobs this user has submitted, in one small JSON file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain import log
from hpctrain.atomic import write_atomically
from hpctrain.batch_systems import find_system
from hpctrain.errors import ConfigError, InstallError, JobError
from hpctrain.install import held

__all__ = ["Ledger", "SubmittedJob", "split_task"]

_KEPT = 1000
_LOCK_WAIT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmittedJob:
    """A job that was submitted."""

    job: str
    batch: str
    name: str
    site: str
    directory: str
    script: str
    log_dir: str
    submitted: str
    """In UTC, as 2026-11-15T06:30:00Z."""
    array_size: int | None = None


class Ledger:
    """What was submitted, newest last. The last thousand are kept.

    A job that cannot be added to the file, because that is damaged or cannot be written, gets a
    separate file in the folder next to it, which is read as well.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / "jobs.json"
        self.aside = home / "jobs.d"

    def entries(self) -> list[SubmittedJob]:
        """All that is remembered.

        Raises:
            JobError: the file is damaged, and nothing else is known.
        """
        aside = self._entries_aside()
        try:
            rows = self._table()
        except JobError as error:
            if not aside:
                raise
            log.warn(str(error))
            rows = []
        return sorted([*rows, *aside], key=lambda entry: entry.submitted)

    def add(self, entry: SubmittedJob) -> None:
        """Remember a job; others may do the same at this moment.

        The job is in the queue already, so this never fails: what cannot be kept in the file is
        kept next to it, or next to the script, with a message.
        """
        try:
            with held(self.path.with_suffix(".lock"), what="record a job", wait_s=_LOCK_WAIT_S):
                rows = [*self._table(), entry][-_KEPT:]
                table = {"version": 1, "jobs": [dataclasses.asdict(row) for row in rows]}
                write_atomically(self.path, json.dumps(table, indent=1))
        except (OSError, InstallError, JobError) as error:
            where = self._put_aside(entry)
            kept = (
                f"it is recorded in {where}" if where else "it could not be recorded: note the id"
            )
            log.warn(f"job {entry.job} was submitted; {kept} ({error})")

    def _table(self) -> list[SubmittedJob]:
        try:
            table = json.loads(self.path.read_text(encoding="utf-8"))
            return [SubmittedJob(**row) for row in table["jobs"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise JobError(
                f"{self.path}, the list of your jobs, cannot be read ({error}); repair it or "
                "move it away"
            ) from error

    def _entries_aside(self) -> list[SubmittedJob]:
        found = []
        for path in sorted(self.aside.glob("*.json")):
            try:
                found.append(SubmittedJob(**json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, TypeError) as error:
                log.warn(f"{path}, the record of a job, cannot be read ({error})")
        return found

    def _put_aside(self, entry: SubmittedJob) -> Path | None:
        """A file for this job alone; None where there is no place for it."""
        text = json.dumps(dataclasses.asdict(entry), indent=1)
        name = f"{time.time_ns()}-{os.getpid()}.json"
        for path in (self.aside / name, Path(f"{entry.script}.{name}")):
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                return path
        return None

    def find(self, job: str | None) -> SubmittedJob | None:
        """The newest entry of that id (or of its array), or the newest of all."""
        for entry in reversed(self.entries()):
            if job is None or job == entry.job or split_task(entry, job)[0] == entry.job:
                return entry
        return None


def split_task(entry: SubmittedJob, job: str) -> tuple[str, int | None]:
    """The array and the index in the id of a task of a job.

    The index is the batch system's own, and some count from 1. The batch system of an old job may
    be a plug-in that is no longer installed: its ids are not taken apart.
    """
    try:
        system = find_system(entry.batch)
    except ConfigError:
        return job, None
    return system.split_task(job)
