"""Which engines this machine has, without loading any of them."""

from __future__ import annotations

import importlib.util

__all__ = ["BUILT"]

BUILT = ["mpi", "torch"] + (["horovod"] if importlib.util.find_spec("horovod") else [])
"""The engines that exchange something."""
