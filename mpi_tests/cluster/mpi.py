"""The MPI of the running Python, for tests that start ranks over several nodes."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpi_tests.cluster.command import ClusterError, run_command

__all__ = ["Mpi", "mpi_of_this_python"]

VERSION = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""
SRUN_PLUGINS = {"mpich": "pmi2", "openmpi": "pmix"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mpi:
    """An MPI and its launcher.

    Attributes:
        family: `mpich` or `openmpi`.
        mpirun: The launcher.
    """

    family: str
    mpirun: str

    @property
    def srun_plugin(self) -> str:
        """The value of srun's `--mpi` that starts ranks of this MPI as one job."""
        return SRUN_PLUGINS[self.family]

    def command(self, ranks: Mapping[str, int], argv: Sequence[str]) -> list[str]:
        """The command that starts so many ranks on each of the hosts.

        Args:
            ranks: How many ranks each host gets.
            argv: What each rank runs.
        """
        hosts = ",".join(f"{host}:{count}" for host, count in ranks.items())
        total = ["-n", str(sum(ranks.values()))]
        if self.family == "mpich":
            return [self.mpirun, "-hosts", hosts, *total, *argv]
        options = ["--allow-run-as-root", "--bind-to", "none", "-H", hosts]
        return [self.mpirun, *options, *total, *argv]


@functools.cache
def mpi_of_this_python() -> Mpi:
    """Asks a child process, so that this one never loads an MPI."""
    version = run_command([sys.executable, "-c", VERSION], timeout_s=60).stdout
    if "Open MPI" in version:
        family = "openmpi"
    elif "MPICH" in version:
        family = "mpich"
    else:
        raise ClusterError(f"mpi4py loads neither MPICH nor Open MPI: {version.splitlines()[:1]}")
    own = Path(sys.prefix) / "bin" / "mpirun"
    found = str(own) if own.exists() else shutil.which("mpirun")
    if found is None:
        raise ClusterError(f"mpi4py loads {family}, but there is no mpirun in {own} or on PATH")
    return Mpi(family=family, mpirun=found)
