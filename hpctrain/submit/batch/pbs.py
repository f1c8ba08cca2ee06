"""PBS Pro: qsub, qdel, qstat. From its documentation; only rendering and arguments tested."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hpctrain.submit.batch.job_state import JobState
from hpctrain.submit.batch.system import Ask, BatchSystem, unreadable

__all__ = ["Pbs"]

_STATES = {"Q": "PENDING", "H": "PENDING", "W": "PENDING", "T": "PENDING", "M": "PENDING"}
_STATES |= {"R": "RUNNING", "E": "RUNNING", "B": "RUNNING", "S": "SUSPENDED", "X": "COMPLETED"}
_ID = re.compile(r"\d+(\[\d*\])?(\.[\w.-]+)?")


class Pbs(BatchSystem):
    """PBS Pro."""

    title = "PBS"

    def submit_words(self, script: Path, *, index: int | None = None) -> list[str]:
        """`qsub`."""
        return ["qsub", str(script)]

    def read_id(self, said: str) -> str:
        """The last line, `123.server` or `123[].server`."""
        lines = said.strip().splitlines()
        if not lines or not _ID.fullmatch(lines[-1]):
            raise unreadable("qsub", said)
        return lines[-1]

    def cancel_words(self, job: str) -> list[str]:
        """`qdel`."""
        return ["qdel", job]

    def ask_state(self, job: str, ask: Ask) -> list[JobState]:
        """`-x`: finished jobs too, as long as the server keeps them."""
        answer = ask(["qstat", "-x", "-f", "-F", "json", job], None)
        if answer is None or answer.code != 0:
            return []
        try:
            jobs = json.loads(answer.out).get("Jobs", {})
        except ValueError:
            return []
        return [_state(name, facts) for name, facts in jobs.items()]

    def log_name(self, name: str, job: str, task: int | None) -> str:
        """As PBS names logs in a directory; a task's index goes between the brackets."""
        return f"{job if task is None else job.replace('[]', f'[{task}]')}.OU"

    def task_id(self, job: str, task: int) -> str:
        """`123[4].server`."""
        return job.replace("[]", f"[{task}]")


def _state(name: str, facts: dict[str, object]) -> JobState:
    code = facts.get("Exit_status")
    exit_code = code if isinstance(code, int) else None
    letter = str(facts.get("job_state", ""))
    state = _STATES.get(letter, "UNKNOWN")
    if letter == "F":
        state = "COMPLETED" if exit_code == 0 else "FAILED"
        if exit_code is None or exit_code == 271:  # ended by qdel, or never started
            state = "CANCELLED"
    used = facts.get("resources_used")
    elapsed = str(used.get("walltime", "")) if isinstance(used, dict) else ""
    return JobState(
        job=name,
        name=str(facts.get("Job_Name", "")),
        state=state,
        exit_code=exit_code,
        elapsed=elapsed,
        reason=str(facts.get("comment", "")),
    )
