"""How much time the allocation has left: from a variable, or the batch system's own command.

One question a rank is too many for a batch system that serves a whole site: rank 0 asks, and tells
the others at a step boundary (`BoundaryMessage.left_s`).
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hpctrain.world import Launch, current_launch

__all__ = ["Allocation", "ask_job", "question", "read_answer", "read_job", "time_left_s"]

_ANSWER_S = 10.0
_AGAIN_S = 600.0
"""Limits can be extended while a job runs, so a command is asked again now and then."""

Ask = Callable[[Sequence[str]], "str | None"]
"""Runs a program and gives what it printed; None where it is missing, fails or is too slow."""


def question(launch: Launch) -> list[str] | None:
    """The command that tells the time left; None where none is known. Pure."""
    job = launch.job_id or ""
    if launch.batch_system == "Slurm":
        return ["squeue", "--noheader", "--jobs", job, "--format", "%L"]
    if launch.batch_system == "PBS":
        return ["qstat", "-f", "-F", "json", job]
    if launch.batch_system == "LSF":
        task = job if launch.job_index is None else f"{job}[{launch.job_index}]"
        return ["bjobs", "-noheader", "-o", "time_left", task]
    if launch.batch_system == "Flux":
        return ["flux", "job", "timeleft"]
    return None


def read_answer(batch_system: str, said: str, *, now_s: float) -> float | None:
    """Read what that command printed, as seconds; None where there is no limit. Pure.

    Args:
        batch_system: As `Launch.batch_system`.
        said: What its command printed.
        now_s: Unix time, for those that tell when a job began.
    """
    readers: Mapping[str, Callable[[str, float], float | None]] = {
        "Slurm": lambda text, _: read_slurm_clock(text),
        "PBS": _read_pbs,
        "LSF": lambda text, _: _read_lsf(text),
        "Flux": lambda text, _: _read_flux(text),
    }
    return readers[batch_system](said, now_s) if batch_system in readers else None


def read_slurm_clock(text: str) -> float | None:
    """Read `[days-][[hours:]minutes:]seconds`; anything else (UNLIMITED, INVALID) is no time."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text.strip(), re.ASCII)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(field or 0) for field in match.groups())
    return float(86400 * days + 3600 * hours + 60 * minutes + seconds)


def _read_pbs(said: str, now_s: float) -> float | None:
    try:
        jobs = json.loads(said)["Jobs"]
        (facts,) = jobs.values()
        limit_s = read_slurm_clock(str(facts["Resource_List"]["walltime"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if limit_s is None:
        return None
    used = facts.get("resources_used")
    used_s = read_slurm_clock(str(used.get("walltime"))) if isinstance(used, dict) else None
    try:  # what was used is counted now and then only; the start is exact
        began = time.mktime(time.strptime(str(facts.get("stime")), "%a %b %d %H:%M:%S %Y"))
    except (ValueError, OverflowError):
        began = now_s
    return max(limit_s - max(used_s or 0.0, now_s - began), 0.0)


def _read_lsf(said: str) -> float | None:
    match = re.match(r"\s*(\d+):(\d+)", said, re.ASCII)
    return None if match is None else 3600.0 * int(match.group(1)) + 60.0 * int(match.group(2))


def _read_flux(said: str) -> float | None:
    try:
        seconds = float(said.strip())
    except ValueError:
        return None
    return seconds if 0.0 <= seconds < float("inf") else None


def ask_program(words: Sequence[str]) -> str | None:
    """Run a client of a batch system, for at most ten seconds."""
    try:
        done = subprocess.run(
            list(words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None


_OVER = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
    }
)
_PBS_OVER = {35, 153}
"""`qstat` says with these codes that a job has finished, or that there is none of that id."""


def ask_job(batch_system: str | None, job: str) -> str | None:
    """Whether another job of this cluster still runs, by the batch system's word.

    Args:
        batch_system: As `Launch.batch_system`.
        job: Its id.

    Returns:
        "over", "ending" (its processes are being killed), "alive", or None: nobody says.
    """
    words = {
        "Slurm": ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"],
        "PBS": ["qstat", job],
    }.get(batch_system or "")
    if words is None:
        return None
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    out, err = (text.decode("utf-8", errors="replace") for text in (done.stdout, done.stderr))
    return read_job(batch_system or "", done.returncode, out, err)


def read_job(batch_system: str, code: int, out: str, err: str) -> str | None:
    """Read the answer to `ask_job`'s question. Pure."""
    if batch_system == "PBS":
        return "over" if code in _PBS_OVER else "alive" if code == 0 else None
    if code != 0:  # a job that the controller has forgotten ended minutes ago
        return "over" if "Invalid job id" in err else None
    state = out.split()[0] if out.split() else ""
    if not state or state in _OVER:
        return "over"
    return "ending" if state == "COMPLETING" else "alive"


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
        """Seconds until the allocation ends, at least 0; None where nobody says."""
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
    """Seconds until this job's allocation ends; None outside a job, or where nobody says.

    The batch system is asked once, for at most ten seconds, and then again every ten minutes in a
    thread. Call it on one rank.
    """
    global _here
    if _here is None:
        _here = Allocation(current_launch())
    return _here.time_left_s()
