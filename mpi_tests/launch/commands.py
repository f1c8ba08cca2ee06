"""Starting commands from tests: bounded, in a process group of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpi_tests.cluster.command import end_group

ROOT = Path(__file__).resolve().parents[2]
HPCTRAIN = [sys.executable, "-m", "hpctrain"]


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str
    elapsed_s: float

    @property
    def text(self) -> str:
        """Everything it said."""
        return self.out + self.err


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The user's environment with this interpreter's tools first and the checkout importable."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    outer_make = dict.fromkeys(("MAKEFLAGS", "MAKELEVEL", "MFLAGS"), "")
    return {**os.environ, **outer_make, "PATH": path, "PYTHONPATH": str(ROOT), **(extra or {})}


def run(
    *argv: str | Path,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Done:
    """Run a command to its end; when its time is up, end its group and fail."""
    started = time.monotonic()
    with subprocess.Popen(
        [str(word) for word in argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(env),
        cwd=cwd or ROOT,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end_group(process)
            out, err = process.communicate()
            raise AssertionError(f"{argv} ran past {timeout_s} s:\n{out}\n{err}") from None
    return Done(process.returncode, out, err, time.monotonic() - started)
