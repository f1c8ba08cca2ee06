"""Which MPI is here: the library mpi4py loads, and the launcher that belongs to it.

A launcher of another MPI starts n silent jobs of one rank each, so the two are matched before
anything is started. Nothing here calls MPI_Init.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpctrain.errors import LaunchError
from hpctrain.mpi_version import MpiVersion, identify

__all__ = [
    "LoadedMpi",
    "MpiVersion",
    "identify",
    "launchers_on",
    "loaded_mpi",
    "matching_mpirun",
    "probe_mpi4py",
]

_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = open("/proc/self/maps").read().split("\\n")
paths = [m.split(None, 5)[5] for m in maps if len(m.split(None, 5)) == 6]
found = [p for p in paths if p.rsplit("/", 1)[-1].startswith(("libmpi.so", "libmpi_abi.so",
         "libmpich.so", "libmpi_cray.so", "libmpi_gnu", "libmpi_nvidia"))]
print(json.dumps({"text": MPI.Get_library_version(), "library": found[0] if found else "",
                  "mpi4py": mpi4py.__version__, "extension": MPI.__file__}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedMpi:
    """The MPI library that an interpreter's mpi4py loads."""

    mpi: MpiVersion
    library: str
    text: str
    mpi4py: str
    extension: str

    @property
    def abi(self) -> str:
        """The ABI variant of mpi4py's module: `mpich`, `openmpi`, `mpiabi`, or `built here`."""
        parts = Path(self.extension).name.split(".")
        return (
            parts[1]
            if len(parts) > 1 and parts[1] in {"mpich", "openmpi", "mpiabi"}
            else "built here"
        )


def probe_mpi4py(python: Path, *, timeout_s: float = 60.0) -> LoadedMpi | None:
    """Ask another interpreter which MPI its mpi4py loads; None when mpi4py cannot load one."""
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE], capture_output=True, text=True, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    facts = json.loads(done.stdout.splitlines()[-1])
    return LoadedMpi(mpi=identify(facts["text"]), **facts)


@cache
def loaded_mpi() -> LoadedMpi:
    """Tell which MPI this interpreter's mpi4py loads.

    Asked in a process of its own: a launcher must not have an MPI library in its memory.

    Raises:
        LaunchError: mpi4py is missing or finds no MPI library.
    """
    loaded = probe_mpi4py(Path(sys.executable))
    if loaded is None:
        raise LaunchError(
            f"mpi4py of {sys.executable} finds no MPI library; load the site's MPI module, or "
            "`pip install mpich`, then try again (`hpctrain doctor` shows what it sees)"
        )
    return loaded


@cache
def _launcher_version(mpirun: Path) -> MpiVersion:
    try:
        done = subprocess.run(
            [str(mpirun), "--version"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return MpiVersion(family="unknown", version="")
    return identify(done.stdout + done.stderr)


def launchers_on(folders: Iterable[str | os.PathLike[str]]) -> list[tuple[Path, MpiVersion]]:
    """List the MPI launchers in these folders, in order, each once, with what they say they are."""
    found: dict[Path, tuple[Path, MpiVersion]] = {}
    for folder in folders:
        for name in ("mpirun", "mpiexec"):
            path = shutil.which(name, path=os.fspath(folder))
            if path and Path(path).resolve() not in found:
                found[Path(path).resolve()] = (Path(path), _launcher_version(Path(path)))
    return list(found.values())


def matching_mpirun(loaded: LoadedMpi, search_path: str) -> tuple[Path, MpiVersion]:
    """Find the launcher that belongs to the MPI that mpi4py loads.

    Args:
        loaded: What mpi4py loads.
        search_path: PATH of the user, searched first; then the interpreter's own `bin` and the
            `bin` beside the library.

    Raises:
        LaunchError: only launchers of other MPIs were found, or none.
    """
    folders = [folder for folder in search_path.split(os.pathsep) if folder]
    folders.append(str(Path(sys.prefix) / "bin"))
    if loaded.library:
        folders += [str(parent / "bin") for parent in Path(loaded.library).parents[1:4]]
    found = launchers_on(folders)
    for mpirun, version in found:
        if version.starts(loaded.mpi):
            return mpirun, version
    seen = ", ".join(f"{path} ({version})" for path, version in found) or "none at all"
    raise LaunchError(
        f"mpi4py loads {loaded.mpi} ({loaded.library or 'path unknown'}), but no launcher of it is "
        f"on PATH; found: {seen}. Put the mpirun of {loaded.mpi} on PATH (module load), or make "
        "mpi4py load the MPI of that launcher (MPI4PY_MPIABI, or `pip uninstall mpich` when the "
        "wheel shadows the site's MPI)"
    )
