"""Gathers what the checks judge: each fact once, on first use, with a time limit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import hpctrain
from hpctrain.batch_systems import all_systems
from hpctrain.errors import LaunchError
from hpctrain.install import (
    LoadedMpi,
    launchers_on,
    matching_mpirun,
    probe_mpi4py,
)
from hpctrain.launch import launch_command, launch_environment
from hpctrain.mpi_version import MpiVersion
from hpctrain.programs import Answer, ask

__all__ = ["Facts", "Match", "without_launcher"]

_OF_LAUNCHERS = (
    *("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_LAUNCHED", "MPI_LOCAL", "HYDI_"),
    *("MV2_COMM_WORLD_", "PALS_", "JSM_"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The launcher that belongs to mpi4py's MPI, or why there is none."""

    mpirun: Path | None = None
    version: MpiVersion | None = None
    trouble: str = ""


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Drop what a launcher or a batch system set: it must not steer ranks started here. Pure."""
    outer = (*_OF_LAUNCHERS, *(word for each in all_systems() for word in each.variable_prefixes))
    return {name: value for name, value in environ.items() if not name.startswith(outer)}


class Facts:
    """What is known of this machine and this interpreter.

    Args:
        environ: The user's environment.
        python: The interpreter whose packages are examined.
        prefix: Its `sys.prefix`.
        limit_s: How long any one program may take to answer.
    """

    def __init__(
        self, environ: Mapping[str, str], *, python: Path, prefix: Path, limit_s: float
    ) -> None:
        self.environ = environ
        self.python = python
        self.prefix = prefix
        self.limit_s = limit_s

    @property
    def path(self) -> str:
        """The user's PATH."""
        return self.environ.get("PATH", "")

    def which(self, program: str) -> Path | None:
        """Find a program on the user's PATH."""
        found = shutil.which(program, path=self.path)
        return Path(found) if found else None

    def ask(self, *command: str, limit_s: float | None = None) -> Answer:
        """Run a program in the user's environment, for at most the limit."""
        return ask(command, environ=self.environ, limit_s=min(limit_s or 1e9, self.limit_s))

    @cached_property
    def loaded(self) -> LoadedMpi | None:
        """The MPI that mpi4py loads; None when it cannot load one."""
        return probe_mpi4py(self.python, timeout_s=self.limit_s)

    @cached_property
    def mpi4py_trouble(self) -> str:
        """Why mpi4py loads nothing; empty when it does."""
        if self.loaded:
            return ""
        code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
        return self.ask(str(self.python), "-c", code).reason

    @cached_property
    def launchers(self) -> list[tuple[Path, MpiVersion]]:
        """The launchers on the user's PATH, in its order."""
        return launchers_on(folder for folder in self.path.split(os.pathsep) if folder)

    @cached_property
    def match(self) -> Match:
        """The launcher that belongs to the loaded MPI."""
        if self.loaded is None:
            return Match(trouble="mpi4py loads no MPI, so no launcher can match it")
        try:
            mpirun, version = matching_mpirun(self.loaded, self.path)
        except LaunchError as error:
            return Match(trouble=str(error))
        return Match(mpirun=mpirun, version=version)

    @cached_property
    def probe(self) -> Answer | None:
        """What two ranks said that were started by the matching launcher; None without one."""
        mpirun, version = self.match.mpirun, self.match.version
        if mpirun is None or version is None or self.loaded is None:
            return None
        num_cores = len(os.sched_getaffinity(0))
        start = launch_command(mpirun, version, num_ranks=2, root=os.geteuid() == 0)
        environ = self.child_environ
        environ |= launch_environment(version, num_ranks=2, num_cores=num_cores)
        program = [str(self.python), "-m", "hpctrain.doctor.probe", self.loaded.library]
        return ask([*start, *program], environ=environ, limit_s=self.limit_s)

    @property
    def probe_works(self) -> bool:
        """Whether ranks can be started at all."""
        return self.probe is not None and self.probe.code == 0

    @cached_property
    def torch_answer(self) -> Answer:
        """What torch says of itself, from a process that may crash or hang without harm."""
        command = [str(self.python), "-m", "hpctrain.doctor.torch_facts"]
        return ask(command, environ=self.child_environ, limit_s=self.limit_s)

    @cached_property
    def torch(self) -> Mapping[str, object]:
        """Torch's facts; empty when it cannot be imported."""
        return next(iter(self.torch_answer.objects()), {})

    @cached_property
    def num_gpus(self) -> int:
        """GPUs that torch sees."""
        gpus = self.torch.get("gpus")
        return len(gpus) if isinstance(gpus, list) else 0

    @property
    def child_environ(self) -> dict[str, str]:
        """The environment for ranks of our own: no launcher's traces, this hpctrain importable."""
        environ = without_launcher(self.environ)
        home = str(Path(hpctrain.__file__).parents[1])
        if "site-packages" not in home and "dist-packages" not in home:
            paths = [*filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), home]
            environ["PYTHONPATH"] = os.pathsep.join(paths)
        return environ
