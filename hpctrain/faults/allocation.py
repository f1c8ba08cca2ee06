"""How much time the allocation has left: from a variable, or the batch system's own command.

One query per rank is too many for a batch system that serves a whole site: rank 0 queries, and
tells the others at a step boundary (`BoundaryMessage.left_s`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hpctrain import programs
from hpctrain.batch_systems import find_system_titled
from hpctrain.world import Launch, current_launch

__all__ = ["Allocation", "ask_job", "question", "read_answer", "time_left_s"]

_ANSWER_S = 10.0
_AGAIN_S = 600.0
"""Limits can be extended while a job runs, so the command is rerun now and then."""

Ask = Callable[[Sequence[str]], "str | None"]
"""Runs a program and returns its output; None if it is missing, fails or is too slow."""


def question(launch: Launch) -> list[str] | None:
    """The command that prints the time left; None if there is none. Pure."""
    system = find_system_titled(launch.batch_system)
    return None if system is None else system.time_left_words(launch.job_id or "", launch.job_index)


def read_answer(batch_system: str, said: str, *, now_s: float) -> float | None:
    """Read what that command printed, as seconds; None where there is no limit. Pure.

    Args:
        batch_system: As `Launch.batch_system`.
        said: What its command printed.
        now_s: Unix time, for those that tell when a job began.
    """
    system = find_system_titled(batch_system)
    return None if system is None else system.read_time_left(said, now_s=now_s)


def ask_program(words: Sequence[str]) -> str | None:
    """Run a client of a batch system, for at most ten seconds."""
    answer = programs.ask(words, limit_s=_ANSWER_S)
    return answer.out if answer.ok else None


def ask_job(batch_system: str | None, job: str) -> str | None:
    """Query the batch system whether another job of this cluster still runs.

    Args:
        batch_system: As `Launch.batch_system`.
        job: Its id.

    Returns:
        "over", "ending" (its processes are being killed), "alive", or None: not known.
    """
    system = find_system_titled(batch_system)
    words = None if system is None else system.activity_words(job)
    if system is None or words is None:
        return None
    answer = programs.ask(words, limit_s=_ANSWER_S)
    return None if answer.code is None else system.read_activity(answer)


class Allocation:
    """The time left to a job, remembered: only the first look may wait for the batch system.

    Args:
        launch: How this process was started.
        ask: Runs the batch system's command.
    """

    def __init__(self, launch: Launch, *, ask: Ask = ask_program) -> None:
        self._launch = launch
        self._ask = ask
        self._words = None if launch.end_time is not None else question(launch)
        self._end: float | None = None
        self._asked_at: float | None = None
        self._asking: threading.Thread | None = None

    def time_left_s(self) -> float | None:
        """Seconds until the allocation ends, at least 0; None if unknown."""
        if self._launch.end_time is not None:
            return max(self._launch.end_time - time.time(), 0.0)
        if self._words is None:
            return None
        if self._asked_at is None:
            self._look()
        elif time.monotonic() - self._asked_at > _AGAIN_S and not self._is_asking():
            self._asked_at = time.monotonic()
            self._asking = threading.Thread(target=self._look, name="hpctrain-time", daemon=True)
            self._asking.start()
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def _is_asking(self) -> bool:
        return self._asking is not None and self._asking.is_alive()

    def _look(self) -> None:
        self._asked_at = time.monotonic()
        said = self._ask(self._words or ())
        if said is None:
            return  # what was known before still holds
        left_s = read_answer(self._launch.batch_system or "", said, now_s=time.time())
        self._end = None if left_s is None else time.monotonic() + left_s


_here: Allocation | None = None


def time_left_s() -> float | None:
    """Seconds until this job's allocation ends; None outside a job, or if unknown.

    The batch system is queried once, for at most ten seconds, and then again every ten minutes in a
    thread. Call it on one rank.
    """
    global _here
    if _here is None:
        _here = Allocation(current_launch())
    return _here.time_left_s()
