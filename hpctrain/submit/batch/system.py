"""What every batch system here can do, and how its programs are asked."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import JobError
from hpctrain.submit.batch.job_state import JobState

__all__ = ["Answer", "Ask", "BatchSystem", "Refused", "ask_program", "unreadable"]

_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """How a program ended and what it said."""

    code: int
    out: str
    err: str


Ask = Callable[[Sequence[str], "Path | None"], "Answer | None"]
"""Runs an argument vector, with a file as standard input; None where there is no such program."""


def ask_program(words: Sequence[str], stdin: Path | None = None) -> Answer | None:
    """Run a client of a batch system: an argument list, never a shell, and not for ever.

    Raises:
        JobError: it did not answer in time.
    """
    try:
        with open(stdin or "/dev/null", "rb") as given:
            done = subprocess.run(
                list(words), stdin=given, capture_output=True, timeout=_LIMIT_S, check=False
            )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise JobError(
            f"{words[0]} did not answer within {_LIMIT_S:g} s; the batch system may be down: try "
            "again later"
        ) from None
    out, err = (text.decode("utf-8", errors="replace") for text in (done.stdout, done.stderr))
    return Answer(code=done.returncode, out=out, err=err)


class Refused(JobError):
    """The batch system did not take the job, so that nothing of it is queued."""


class BatchSystem(ABC):
    """A batch system: argument vectors out, answers in."""

    title: str

    @abstractmethod
    def submit_words(self, script: Path, *, index: int | None = None) -> list[str]:
        """The command that takes a script; `index` where hpctrain numbers tasks itself."""

    @abstractmethod
    def read_id(self, said: str) -> str:
        """The job's id in what that command said."""

    @abstractmethod
    def cancel_words(self, job: str) -> list[str]:
        """The command that ends a job."""

    @abstractmethod
    def ask_state(self, job: str, ask: Ask) -> list[JobState]:
        """What the batch system knows of a job, one entry per task; empty where it knows none."""

    @abstractmethod
    def log_name(self, name: str, job: str, task: int | None) -> str:
        """The file in the log directory that a job writes to."""

    def task_id(self, job: str, task: int) -> str:
        """The id of one task of an array, counted from 0."""
        return f"{job}_{task + self.first_index}"

    reads_script_from_stdin = False
    has_arrays = True
    first_index = 0
    """Of the tasks of an array."""

    def submit(self, script: Path, ask: Ask, *, index: int | None = None) -> str:
        """Hand a script over and return the job's id.

        Raises:
            Refused: the batch system is not here, or refuses.
            JobError: it answers with no id; the job may be queued all the same.
        """
        words = self.submit_words(script, index=index)
        answer = ask(words, script if self.reads_script_from_stdin else None)
        if answer is None:
            raise Refused(
                f"{words[0]} is not on PATH, so jobs cannot be submitted to {self.title} from "
                "here; submit from a login node, or use `hpctrain job render`"
            )
        if answer.code != 0:
            raise Refused(
                f"{words[0]} refused {script} (exit code {answer.code}): {answer.err.strip()}"
            )
        return self.read_id(answer.out)

    def cancel(self, job: str, ask: Ask) -> None:
        """End a job.

        Raises:
            JobError: the batch system is not here or refuses.
        """
        words = self.cancel_words(job)
        answer = ask(words, None)
        if answer is None or answer.code != 0:
            why = "is not on PATH" if answer is None else f"refused: {answer.err.strip()}"
            raise JobError(f"{words[0]} {why}; job {job} was not cancelled")


def unreadable(program: str, said: str) -> JobError:
    """The error for an answer with no job id in it."""
    return JobError(
        f"{program} answered {said.strip()!r}, in which no job id is to be found; ask the batch "
        "system itself whether the job is there"
    )
