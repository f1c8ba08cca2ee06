"""LSF: bsub, bkill, bjobs. Written from its documentation; only rendering and arguments tested."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hpctrain.submit.batch.job_state import JobState
from hpctrain.submit.batch.system import Ask, BatchSystem, unreadable

__all__ = ["Lsf"]

_STATES = {"PEND": "PENDING", "WAIT": "PENDING", "PSUSP": "PENDING", "RUN": "RUNNING"}
_STATES |= {"USUSP": "SUSPENDED", "SSUSP": "SUSPENDED", "DONE": "COMPLETED", "EXIT": "FAILED"}


class Lsf(BatchSystem):
    """LSF."""

    title = "LSF"
    first_index = 1
    reads_script_from_stdin = True  # given as an argument, its directives would be ignored

    def submit_words(self, script: Path, *, index: int | None = None) -> list[str]:
        """`bsub`, with the script on standard input."""
        return ["bsub"]

    def read_id(self, said: str) -> str:
        """`Job <123> is submitted to queue <batch>.`."""
        match = re.search(r"Job <(\d+)> is submitted", said)
        if match is None:
            raise unreadable("bsub", said)
        return match.group(1)

    def cancel_words(self, job: str) -> list[str]:
        """`bkill`."""
        return ["bkill", job]

    def ask_state(self, job: str, ask: Ask) -> list[JobState]:
        """`-a`: finished jobs too, as long as LSF keeps them."""
        columns = "jobid jobindex stat exit_code run_time job_name pend_reason"
        answer = ask(["bjobs", "-a", "-json", "-o", columns, job], None)
        if answer is None or answer.code != 0:
            return []
        try:
            records = json.loads(answer.out).get("RECORDS", [])
        except ValueError:
            return []
        return [_state(record) for record in records if "STAT" in record]

    def log_name(self, name: str, job: str, task: int | None) -> str:
        """As the directive `-o` has it; LSF counts tasks from 1."""
        return (
            f"{name}-{job}.out" if task is None else f"{name}-{job}_{task + self.first_index}.out"
        )

    def task_id(self, job: str, task: int) -> str:
        """`123[4]`, from 1."""
        return f"{job}[{task + self.first_index}]"


def _state(record: dict[str, str]) -> JobState:
    index = record.get("JOBINDEX", "0")
    state = _STATES.get(record["STAT"], "UNKNOWN")
    code = record.get("EXIT_CODE", "")
    default = 0 if state == "COMPLETED" else None
    return JobState(
        job=record["JOBID"] if index in ("", "0") else f"{record['JOBID']}[{index}]",
        name=record.get("JOB_NAME", ""),
        state=state,
        exit_code=int(code) if code.isdecimal() else default,
        elapsed=record.get("RUN_TIME", ""),
        reason=record.get("PEND_REASON", ""),
    )
