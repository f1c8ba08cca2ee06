"""A real two-rank run, the only proof that launcher, MPI library and extension fit together."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.install.mpi import MpiVersion
from hpctrain.install.process import end_group

__all__ = ["MPI4PY_PROOF", "Trial", "run_two_ranks", "two_rank_command"]

# Each rank contributes rank + 1, so only a real job of two sums to three.
MPI4PY_PROOF = """
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
if world.size != 2 or total != 3:
    raise SystemExit(f"size {world.size} and sum {total}, expected 2 and 3")
if world.rank == 0:
    print("two ranks met")
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """How a two-rank run went."""

    ok: bool
    output: str

    @property
    def last_line(self) -> str:
        """The line most likely to name the cause."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip(" -\t")]
        return lines[-1] if lines else "no output"


def two_rank_command(
    mpirun: Path, version: MpiVersion, program: list[str], *, root: bool
) -> list[str]:
    """Pure: the command that starts `program` twice, with the flags that this MPI insists on."""
    command = [str(mpirun)]
    if version.family == "openmpi":
        if root:
            command.append("--allow-run-as-root")
        old = version.version.split(".", 1)[0] in {"1", "2", "3", "4"}
        command += ["--oversubscribe"] if old else ["--map-by", ":OVERSUBSCRIBE"]
    return [*command, "-n", "2", *program]


def run_two_ranks(
    mpirun: Path,
    version: MpiVersion,
    program: list[str],
    *,
    environ: Mapping[str, str],
    timeout_s: float = 60.0,
) -> Trial:
    """Start `program` as two ranks and wait at most `timeout_s` for both to end."""
    command = two_rank_command(mpirun, version, program, root=os.geteuid() == 0)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(environ),
            start_new_session=True,
        )
    except OSError as error:
        return Trial(ok=False, output=f"{mpirun} does not start: {error}")
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_group(process.pid)
        output, _ = process.communicate()
        return Trial(ok=False, output=f"{output}\nno end after {timeout_s:.0f} s")
    except BaseException:
        end_group(process.pid)
        raise
    return Trial(ok=process.returncode == 0, output=output)
