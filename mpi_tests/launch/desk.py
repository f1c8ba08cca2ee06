"""A user's terminal on the login node of the private Slurm: nothing but the command line."""

from __future__ import annotations

import json
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
            rows = self.status(job)
            if all(row["state"] in FINAL for row in rows):
                return rows
            time.sleep(0.5)
        pytest.fail(f"job {job} is not over: {rows}\n{self.log(job)}")

    def wait_for(self, job: str, word: str, count: int) -> None:
        """Wait until the log has so many of a word."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            log = self.log(job)
            if log.count(word) >= count:
                return
            time.sleep(0.3)
        pytest.fail(f"job {job} never said {word!r} {count} times:\n{log}")

    def log(self, job: str, *more: str) -> str:
        return self.hpctrain("job", "logs", job, *more, check=False)[1]
