"""Which engines this machine has, without loading any of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["BUILT", "OUTSIDE"]

BUILT = ["mpi", "torch"] + (["horovod"] if importlib.util.find_spec("horovod") else [])
"""The engines that exchange something."""

OUTSIDE = Path(__file__).resolve().parent / "outside"
"""Where a package is that adds an engine by an entry point, as `site-packages` would have it."""
