"""Slurm: sbatch, scancel, and sacct where there is accounting, else scontrol."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.submit.batch.job_state import JobState
from hpctrain.submit.batch.system import Ask, BatchSystem, unreadable

__all__ = ["Slurm", "read_sacct", "read_scontrol", "why_no_expedite"]

_FIELDS = ("JobID", "JobName", "State", "ExitCode", "Elapsed")
_ID = re.compile(r"(\d+)(?:;[\w.-]+)?\s*")


_EXPEDITES = (25, 11)


def why_no_expedite(ask: Ask) -> str | None:
    """Why this Slurm would refuse `--requeue=expedite`; None where it would not, or is not here."""
    version = ask(["sbatch", "--version"], None)
    if version is None:
        return None
    match = re.search(r"(\d+)\.(\d+)", version.out)
    if match is None or (int(match[1]), int(match[2])) < _EXPEDITES:
        return f"it came with Slurm 25.11, and this is {version.out.strip() or 'of no version'}"
    config = ask(["scontrol", "show", "config"], None)
    if config is None or "enable_expedited_requeue" not in config.out:
        return "this site has not switched it on (SlurmctldParameters=enable_expedited_requeue)"
    return None


class Slurm(BatchSystem):
    """Slurm."""

    title = "Slurm"

    def submit_words(self, script: Path, *, index: int | None = None) -> list[str]:
        """`--parsable`: the id alone, or with the cluster's name."""
        return ["sbatch", "--parsable", str(script)]

    def read_id(self, said: str) -> str:
        """The number before the semicolon, in the last line: sites print greetings."""
        lines = said.strip().splitlines()
        match = _ID.fullmatch(lines[-1]) if lines else None
        if match is None:
            raise unreadable("sbatch", said)
        return match.group(1)

    def cancel_words(self, job: str) -> list[str]:
        """`scancel`."""
        return ["scancel", job]

    def ask_state(self, job: str, ask: Ask) -> list[JobState]:
        """What the controller knows, being the newest; else what accounting remembers."""
        current = ask(["scontrol", "--oneliner", "show", "job", job], None)
        if current is not None and current.code == 0 and (found := read_scontrol(current.out)):
            return found
        words = ["sacct", "--allocations", "--parsable2", "--noheader", f"--jobs={job}"]
        past = ask([*words, f"--format={','.join(_FIELDS)}"], None)
        return read_sacct(past.out) if past is not None and past.code == 0 else []

    def log_name(self, name: str, job: str, task: int | None) -> str:
        """As the directive `--output` has it."""
        return f"{name}-{job}.out" if task is None else f"{name}-{job}_{task}.out"


def read_sacct(said: str) -> list[JobState]:
    """Read the lines of `sacct --parsable2`."""
    found = []
    for line in said.splitlines():
        fields = dict(zip(_FIELDS, line.split("|"), strict=False))
        if len(fields) == len(_FIELDS):
            found.append(
                JobState(
                    job=fields["JobID"],
                    name=fields["JobName"],
                    state=fields["State"].split()[0] if fields["State"] else "UNKNOWN",
                    exit_code=_exit_code(fields["ExitCode"]),
                    elapsed=fields["Elapsed"],
                )
            )
    return found


def read_scontrol(said: str) -> list[JobState]:
    """Read the lines of `scontrol --oneliner show job`."""
    found = []
    for line in said.splitlines():
        fields = dict(re.findall(r"(?:^|\s)([A-Z][A-Za-z/:]*)=(\S*)", line))
        if "JobId" in fields:
            array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
            found.append(
                JobState(
                    job=f"{array}_{task}" if array and task else fields["JobId"],
                    name=fields.get("JobName", ""),
                    state=fields.get("JobState", "UNKNOWN"),
                    exit_code=_exit_code(fields.get("ExitCode", "")),
                    elapsed=fields.get("RunTime", ""),
                    restarts=int(fields["Restarts"]) if "Restarts" in fields else None,
                    reason="" if fields.get("Reason") == "None" else fields.get("Reason", ""),
                    log=fields.get("StdOut", ""),
                )
            )
    return found


def _exit_code(text: str) -> int | None:
    """Slurm writes `code:signal`; a signal is told the way a shell would."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        return None
    code, signal = (int(number) for number in match.groups())
    return code or (128 + signal if signal else 0)
