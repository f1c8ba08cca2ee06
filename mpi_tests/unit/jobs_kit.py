"""What the tests of jobs share: sites, requests, and programs that record their calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hpctrain.submit import Request, Site, load_site
from hpctrain.submit.places import JOBS

SITES = [JOBS / "sites"]
GENERIC = {"slurm": "slurm", "pbs": "pbs", "lsf": "lsf", "flux": "flux"}

RECORDER = """#!/bin/bash
printf '%s\\0' "$#" "${0##*/}" "$@" >>"$RECORD"
case "${0##*/} ${1-}" in
    'flux getattr') echo known ;;
    'sbatch '*) echo '4711;cluster' ;;
    'qsub '*) echo '4711.server' ;;
    'bsub '*) cat >"$RECORD.stdin"; echo 'Job <4711> is submitted to queue <batch>.' ;;
    'flux batch') echo f4711 ;;
    'srun '* | 'mpirun '* | 'mpiexec '* | 'jsrun '* | 'flux run') exit "${FAKE_CODE:-0}" ;;
esac
"""
PROGRAMS = (
    *(
        "srun",
        "mpirun",
        "mpiexec",
        "jsrun",
        "flux",
        "sbcast",
        "scontrol",
        "sinfo",
        "module",
        "sbatch",
    ),
    *("scancel", "sacct", "qsub", "qstat", "qdel", "bsub", "bjobs", "bkill"),
)
BATCH_ENVIRONMENT = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "1",
    "PBS_JOBID": "7.server",
    "PBS_ARRAY_INDEX": "1",
    "LSB_JOBID": "7",
    "LSB_JOBINDEX": "2",
    "HPCTRAIN_ARRAY_INDEX": "1",
}


def site(name: str = "slurm") -> Site:
    return load_site(name, SITES)


def ask(**fields: object) -> Request:
    """A small request, with whatever else a test wants in it."""
    fields.setdefault("commands", (("python", "train.py"),))
    return Request(**{"walltime_s": 3600, **fields})  # type: ignore[arg-type]


def account_for(name: str) -> dict[str, str]:
    return {"account": "proj"} if site(name).needs_account else {}


class Recorder:
    """A folder of programs that write down their arguments."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.record, self.work = folder / "bin", folder / "record", folder / "work"
        for path in (self.bin, self.work, self.work / "logs"):
            path.mkdir(exist_ok=True)
        for name in PROGRAMS:
            (self.bin / name).write_text(RECORDER)
            (self.bin / name).chmod(0o755)
        (self.work / "nodes").write_text("n1\nn2\n")

    def environment(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join([str(self.bin), "/usr/bin", "/bin"])
        own = {"PATH": path, "RECORD": str(self.record), "PBS_NODEFILE": str(self.work / "nodes")}
        return {**BATCH_ENVIRONMENT, **own, "PBS_O_WORKDIR": str(self.work), **more}

    def run(self, script: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a script to its end with these programs."""
        self.record.unlink(missing_ok=True)
        return subprocess.run(
            ["bash", "-s"],
            input=script,
            text=True,
            capture_output=True,
            timeout=60,
            cwd=self.work,
            env=self.environment(**more),
        )

    def calls(self) -> list[list[str]]:
        """All calls so far: program and arguments."""
        if not self.record.exists():
            return []
        words = self.record.read_bytes().decode().split("\0")[:-1]
        calls = []
        while words:
            count = int(words.pop(0))
            calls.append([words.pop(0) for _ in range(count + 1)])
        return calls
