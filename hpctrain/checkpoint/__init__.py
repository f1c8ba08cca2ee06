"""Floor 3: checkpoints: complete or not there, read by any number of ranks, never a pickle.

Knows nothing of replicas or loaders: what is saved are plain state trees. Names are loaded on first
use: listing, checking and choosing checkpoints needs neither torch nor MPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.checkpoint.alone import read_checkpoint, write_checkpoint
    from hpctrain.checkpoint.catalog import Entry, list_checkpoints
    from hpctrain.checkpoint.comparing import differences
    from hpctrain.checkpoint.exporting import export, import_torch
    from hpctrain.checkpoint.finding import find_checkpoint, load_weights
    from hpctrain.checkpoint.retention import Keep
    from hpctrain.checkpoint.store import Loaded, Store
    from hpctrain.checkpoint.verifying import verify

__all__ = [
    "Entry",
    "Keep",
    "Loaded",
    "Store",
    "differences",
    "export",
    "find_checkpoint",
    "import_torch",
    "list_checkpoints",
    "load_weights",
    "read_checkpoint",
    "verify",
    "write_checkpoint",
]

_HOME = {
    "Entry": "catalog",
    "Keep": "retention",
    "Loaded": "store",
    "Store": "store",
    "differences": "comparing",
    "export": "exporting",
    "find_checkpoint": "finding",
    "import_torch": "exporting",
    "list_checkpoints": "catalog",
    "load_weights": "finding",
    "read_checkpoint": "alone",
    "verify": "verifying",
    "write_checkpoint": "alone",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'hpctrain.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"hpctrain.checkpoint.{_HOME[name]}"), name)
