"""Which MPI is here: the library mpi4py loads, the launcher that belongs to it, its compiler.

A launcher of another MPI starts n silent jobs of one rank each, so the two are matched before
anything is started. Only the two-rank run calls MPI_Init, in processes of its own: it alone proves
that launcher, library and extension fit together.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpctrain.errors import LaunchError
from hpctrain.mpi_version import MpiVersion, identify
from hpctrain.programs import Answer, ask

__all__ = [
    "MPI4PY_PROOF",
    "LoadedMpi",
    "lacks_headers",
    "launchers_on",
    "loaded_mpi",
    "matching_mpirun",
    "probe_mpi4py",
    "run_two_ranks",
    "two_rank_command",
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
    """Query another interpreter for the MPI its mpi4py loads; None if it cannot load one."""
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

    Queried in a separate process: a launcher must not load an MPI library.

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
            `bin` next to the library.

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


def lacks_headers(wrapper: Path, environ: Mapping[str, str]) -> bool:
    """Whether `mpicc` or `mpicxx` runs a compiler that does not find mpi.h.

    False also when it runs no compiler at all: that is another trouble, with another cure.
    """
    try:
        done = subprocess.run(
            [str(wrapper), "-E", "-x", "c", "-"],
            input="#include <mpi.h>\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode != 0 and "mpi.h" in done.stderr


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
