"""A user's terminal on the login node of the private Slurm: nothing but the command line."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpi_tests.cluster.slurm import FINAL, Slurm
from mpi_tests.launch.commands import HPCTRAIN, clean_environment

__all__ = ["LIMIT_S", "Desk"]

LIMIT_S = 120


@dataclass
class Desk:
    """A user's terminal on the login node: nothing but the command line."""

    slurm: Slurm
    folder: Path

    def hpctrain(self, *words: str, check: bool = True) -> tuple[int, str, str]:
        env = clean_environment({"XDG_STATE_HOME": str(self.folder / "state")})
        kept = ("PATH", "PYTHONPATH", "XDG_STATE_HOME")
        done = self.slurm.run(
            [*HPCTRAIN, *words],
            timeout_s=LIMIT_S,
            cwd=self.folder,
            env={name: env[name] for name in kept},
            check=False,
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    def submit(self, *words: str) -> list[str]:
        _, out, _ = self.hpctrain("job", "submit", "--quiet", "--time", "10m", *words)
        return out.split()

    def status(self, job: str) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = json.loads(self.hpctrain("job", "status", "--json", job)[1])
        return rows

    def ended(self, job: str) -> list[dict[str, object]]:
        """The states of a job once all of its tasks are over."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if self._looks_over(job):
                rows = self.status(job)
                if all(row["state"] in FINAL for row in rows):
                    return rows
            time.sleep(0.3)
        pytest.fail(f"job {job} is not over: {self.status(job)}\n{self.log(job)}")

    def _looks_over(self, job: str) -> bool:
        """What Slurm says itself: a hundredth of what it costs to start Python for the same."""
        words = ["scontrol", "--oneliner", "show", "job", job]
        shown = self.slurm.run(words, timeout_s=LIMIT_S, check=False)
        states = re.findall(r" JobState=(\w+)", shown.stdout)
        return shown.returncode != 0 or all(state in FINAL for state in states)

    def wait_for(self, job: str, word: str, count: int) -> None:
        """Wait until the log has so many of a word."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if sum(text.count(word) for text in self._texts(job)) >= count:
                return
            time.sleep(0.1)
        pytest.fail(f"job {job} never said {word!r} {count} times:\n{self.log(job)}")

    def _texts(self, job: str) -> list[str]:
        """The files in which the job's tasks write, read without the command line."""
        logs = self.folder / "logs"
        files = [*logs.glob(f"*-{job}.out"), *logs.glob(f"*-{job}_*.out")]
        return [path.read_text(errors="replace") for path in files]

    def log(self, job: str, *more: str) -> str:
        return self.hpctrain("job", "logs", job, *more, check=False)[1]
