"""A real two-rank run, the only proof that launcher, MPI library and extension fit together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpctrain.install.mpi import MpiVersion
from hpctrain.programs import Answer, ask

__all__ = ["MPI4PY_PROOF", "run_two_ranks", "two_rank_command"]

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
) -> Answer:
    """Start `program` as two ranks and wait at most `timeout_s` for both to end."""
    command = two_rank_command(mpirun, version, program, root=os.geteuid() == 0)
    return ask(command, environ=environ, limit_s=timeout_s)
