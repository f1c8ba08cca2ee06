"""`make clean`: remove the venv and what the tools left in the checkout, and nothing else."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from hpctrain import log
from hpctrain.install.setup.venv import may_clear

__all__ = ["clean"]

_LEFTOVERS = (
    "build",
    "dist",
    "*.egg-info",
    ".hypothesis",
    ".import_linter_cache",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
)


def clean(venv: Path, checkout: Path) -> int:
    """Remove them; 1 if the venv's folder is something else, which is left alone."""
    for pattern in _LEFTOVERS:
        for folder in checkout.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
    for top in ("benchmarks", "examples", "hpctrain", "mpi_tests"):
        for folder in list((checkout / top).rglob("__pycache__")):
            shutil.rmtree(folder, ignore_errors=True)
    if not may_clear(venv):
        log.notice(f"{venv} is not a virtual environment, so it was left alone")
        return 1
    shutil.rmtree(venv, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(clean(Path(sys.argv[1]), Path(__file__).resolve().parents[3]))
