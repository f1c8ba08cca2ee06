"""Why a build failed, read from its log. Pure, and best effort: the log itself is always named."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["BuildDiagnosis", "diagnose"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildDiagnosis:
    """The likely cause of a failure and what to do about it."""

    why: str
    cure: str


# First match wins, so causes come before the errors that follow from them.
_CAUSES = (
    (
        r"No module named pip\b",
        "this Python has no pip",
        "run `python -m ensurepip --upgrade` (or install pip) there",
    ),
    (
        r"(Killed signal terminated program|Killed\s+.*cc1plus|virtual memory exhausted"
        r"|cannot allocate memory|fatal error: Killed)",
        "the compiler ran out of memory",
        "build with fewer parallel compilers (--jobs 1), or on a node with more memory",
    ),
    (
        r"No space left on device",
        "the disk is full",
        "free some space, or set TMPDIR to a folder on a larger disk",
    ),
    (
        r"(Temporary failure in name resolution|Name or service not known|Network is unreachable"
        r"|NewConnectionError|ConnectTimeoutError|ProxyError|Max retries exceeded"
        r"|No matching distribution found for horovod)",
        "the package index cannot be reached or does not have it",
        "download the sdist elsewhere (`pip download --no-deps --no-binary :all: "
        "horovod==0.28.1`) and build with --sdist FILE",
    ),
    (
        r"Python\.h: No such file",
        "the C headers of Python are missing",
        "install them (Debian and Ubuntu: `apt install python3-dev`), or use another Python",
    ),
    (
        r"(mpi\.h: No such file|MPI::MPI_CXX\" includes non-existent path)",
        "the MPI's compiler wrapper is installed, but its headers are not",
        "install the MPI's development package (Debian and Ubuntu: `apt install libopenmpi-dev`)",
    ),
    (
        r"(Could not find a recent CMake|Failed to install temporary CMake"
        r"|No such file or directory: '?cmake)",
        "CMake 3.13 or later is missing",
        "`pip install 'cmake<5'`, or load the site's cmake module",
    ),
    (
        r"Could NOT find MPI",
        "CMake could not compile with the MPI's mpicxx",
        "check that `mpicxx` of this MPI compiles a small program (module load, matching compiler)",
    ),
    (
        r"(The CXX compiler identification is unknown|is not able to compile a simple test program"
        r"|CMAKE_CXX_COMPILER not set)",
        "the C++ compiler does not work",
        "install g++ 9 or later, or name a working one in CXX",
    ),
    (
        r"(Could NOT find NCCL|nccl\.h: No such file)",
        "NCCL was not found by the build",
        "set NCCL_HOME to the folder with its include and lib, or build with --no-cuda",
    ),
    (
        r"(unsupported GNU version|Could NOT find CUDAToolkit|nvcc fatal)",
        "the CUDA compiler does not work with this machine's compiler",
        "load a CUDA toolkit that fits both torch and g++, or build with --no-cuda",
    ),
)


def diagnose(log_text: str) -> BuildDiagnosis:
    """Find the likely cause in a build's output; failing that, its first error line."""
    for pattern, why, cure in _CAUSES:
        if re.search(pattern, log_text, re.IGNORECASE):
            return BuildDiagnosis(why=why, cure=cure)
    first = _first_error(log_text)
    return BuildDiagnosis(
        why=f"the first error is: {first}" if first else "the log names no error",
        cure="read the log around its first `error:`; another compiler can be named in CXX",
    )


def _first_error(log_text: str) -> str:
    # Compiler messages first: pip and CMake only repeat that something failed.
    patterns = (
        r"^.*?:\d+:\d+: (?:fatal )?error: .*$",
        r"^\s*CMake Error\b.*\n.*$",
        r"^(?!.*subprocess-exited-with-error).*\berror\b ?:.*$",
        r"^(?!.*subprocess-exited-with-error)ERROR.*$",
    )
    for pattern in patterns:
        match = re.search(pattern, log_text, re.IGNORECASE | re.MULTILINE)
        if match:
            return " ".join(match.group(0).split())[:300]
    return ""
