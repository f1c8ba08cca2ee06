"""Whether an MPI's compiler wrapper has its headers, which distributions package apart from it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["lacks_headers"]


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
