"""Flux: flux batch, cancel, jobs. From its documentation; only rendering and arguments tested."""

from __future__ import annotations

from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.submit.batch.job_state import JobState
from hpctrain.submit.batch.system import Ask, BatchSystem, unreadable
from hpctrain.submit.request import check_job_id

__all__ = ["Flux"]

_STATES = {"CANCELED": "CANCELLED", "RUN": "RUNNING", "CLEANUP": "RUNNING"}
_STATES |= dict.fromkeys(("NEW", "DEPEND", "PRIORITY", "SCHED"), "PENDING")


class Flux(BatchSystem):
    """Flux, whose batch jobs know no arrays: each task is a job that gets its index."""

    title = "Flux"
    has_arrays = False

    def submit_words(self, script: Path, *, index: int | None = None) -> list[str]:
        """`flux batch`."""
        given = [] if index is None else [f"--env=HPCTRAIN_ARRAY_INDEX={index}"]
        return ["flux", "batch", *given, str(script)]

    def read_id(self, said: str) -> str:
        """The last line."""
        lines = said.strip().splitlines()
        try:
            return check_job_id(lines[-1] if lines else "")
        except ConfigError:
            raise unreadable("flux", said) from None

    def cancel_words(self, job: str) -> list[str]:
        """`flux cancel`."""
        return ["flux", "cancel", job]

    def ask_state(self, job: str, ask: Ask) -> list[JobState]:
        """`flux jobs` with columns of our own."""
        words = ["flux", "jobs", "--no-header", "--format={status}|{returncode}|{runtime!F}|{name}"]
        answer = ask([*words, job], None)
        if answer is None or answer.code != 0:
            return []
        found = []
        for line in answer.out.splitlines():
            status, code, elapsed, name = ([*line.split("|", 3), "", "", ""])[:4]
            found.append(
                JobState(
                    job=job,
                    name=name,
                    state=_STATES.get(status, status or "UNKNOWN"),
                    exit_code=int(code) if code.lstrip("-").isdecimal() else None,
                    elapsed=elapsed,
                )
            )
        return found

    def log_name(self, name: str, job: str, task: int | None) -> str:
        """As the directive `--output` has it."""
        return f"{name}-{job}.out"
