"""How Horovod is made to compile with today's torch and compilers. Pure text, no side effects.

Its sources request C++14 from CMake where torch needs C++17, and miss includes that newer compilers
no longer bring along. A wrapper around the compiler mends both; no source is altered.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.install.horovod.cache import mpi_is_inside
from hpctrain.install.horovod.facts import BuildFacts, PythonFacts

__all__ = [
    "build_environment",
    "compiler_wrapper",
    "fetch_headers",
    "header_folders",
    "jobs_for",
    "relative_rpath",
    "shim",
]

FORGOTTEN_INCLUDES = ("stdexcept", "string", "cstdint", "memory", "functional", "vector")
_JOB_BYTES = 2 * 1024**3

# CMake writes the absolute folder of the MPI it linked into the extension. Where that MPI lives
# inside the environment, a relative one lets the cached wheel serve other environments too.
_RELOCATE = """\
left=$#
while [ "$left" -gt 0 ]; do
    argument=$1
    shift
    left=$((left - 1))
    case $argument in
        -Wl,-rpath,*) argument={rpath} ;;
    esac
    set -- "$@" "$argument"
done
"""


def compiler_wrapper(compiler: Path, rpath: str | None = None) -> str:
    """The text of a `sh` script to be used as CXX.

    Args:
        compiler: The real C++ compiler.
        rpath: Replaces every run path that CMake sets; None keeps them.
    """
    includes = " ".join(f"-include {name}" for name in FORGOTTEN_INCLUDES)
    relocate = _RELOCATE.format(rpath=shlex.quote(f"-Wl,-rpath,{rpath}")) if rpath else ""
    # The last -std wins, so it goes last.
    return f'#!/bin/sh\n{relocate}exec {shlex.quote(str(compiler))} "$@" -std=gnu++17 {includes}\n'


def shim(program: Path) -> str:
    """The text of a `sh` script that runs `program`, for a folder that goes first on PATH."""
    return f'#!/bin/sh\nexec {shlex.quote(str(program))} "$@"\n'


def relative_rpath(facts: BuildFacts) -> str | None:
    """Run path of the extension from its own place, or None when the MPI is not inside."""
    if not mpi_is_inside(facts.python, facts.mpi):
        return None
    home = facts.python.site_packages / "horovod" / "torch"
    library = os.path.relpath(facts.mpi.library.parent, home)
    return f"$ORIGIN/{library}:$ORIGIN/../../torch/lib"


def build_environment(
    facts: BuildFacts,
    *,
    jobs: int,
    work: Path,
    includes: Sequence[Path],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """The environment of the build: the user's, less what would steer it elsewhere, plus ours.

    Args:
        facts: What to build against.
        jobs: Compilers at a time.
        work: The build's private folder: `bin` with the shims, `tools` with missing build tools,
            `tmp`, and `nccl` for CUDA.
        includes: Folders with Python's headers.
        environ: The user's environment.
    """
    # HOROVOD_* of the user would change the result behind the cache key's back.
    env = {name: text for name, text in environ.items() if not name.startswith("HOROVOD_")}
    path = [str(work / "bin"), str(work / "tools" / "bin"), str(facts.python.executable.parent)]
    # Python's headers by CPATH: Horovod uses distutils to find them, which Python 3.12 lacks.
    env |= {
        "PATH": _joined(*path, environ.get("PATH", "")),
        "PYTHONPATH": _joined(str(work / "tools"), environ.get("PYTHONPATH", "")),
        "CPATH": _joined(*map(str, includes), environ.get("CPATH", "")),
        "CXX": str(work / "bin" / "cxx"),
        "CMAKE_GENERATOR": "Unix Makefiles",
        "MAKEFLAGS": f"-j{jobs}",
        "MPI_HOME": str(work),
        "TMPDIR": str(work / "tmp"),
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITHOUT_GLOO": "1",
    }
    if facts.cuda is not None:
        env |= {
            "HOROVOD_GPU": "CUDA",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(facts.cuda.home),
            "HOROVOD_NCCL_HOME": str(work / "nccl"),
            "HOROVOD_NCCL_LINK": "SHARED",
            "CUDA_HOME": str(facts.cuda.home),
        }
    return env


def jobs_for(cores: int, memory_bytes: int) -> int:
    """Compilers to run at a time: one a core, and 2 GiB of memory for each."""
    return max(1, min(cores, memory_bytes // _JOB_BYTES))


def _joined(*parts: str) -> str:
    """Join the parts that are there: an empty one would mean the current folder."""
    return os.pathsep.join(part for part in parts if part)


def header_folders(python: PythonFacts, unpacked: Path) -> list[Path]:
    """Pure: where the headers are, the interpreter's own folder first, then an unpacked package.

    Debian's pyconfig.h includes another by a path that starts at usr/include.
    """
    inside = unpacked / "usr" / "include"
    return [python.include, inside / python.include.name, inside]


def fetch_headers(python: PythonFacts, folder: Path, environ: Mapping[str, str]) -> bool:
    """Make sure that Python.h is available, unpacking the distribution's package if necessary.

    Returns:
        Whether the headers are there now. Never raises: the build's own error is clearer.
    """
    if (python.include / "Python.h").is_file():
        return True
    tools = [shutil.which(name, path=environ.get("PATH")) for name in ("apt-get", "dpkg-deb")]
    # Only the distribution's own interpreter fits the distribution's headers.
    if None in tools or not str(python.include).startswith("/usr/include/"):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    package = f"lib{python.include.name}-dev"
    commands = [
        (["apt-get", "-q", "download", package], 120),
        (["sh", "-c", f'for file in {package}_*.deb; do dpkg-deb -x "$file" .; done'], 60),
    ]
    for command, limit_s in commands:
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, timeout=limit_s, env=dict(environ)
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        if done.returncode != 0:
            return False
    return (folder / "usr" / "include" / python.include.name / "Python.h").is_file()
