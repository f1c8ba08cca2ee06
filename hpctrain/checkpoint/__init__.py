"""Floor 3: checkpoints: complete or not there, read by any number of ranks, never a pickle.

Knows nothing of replicas or loaders: what is saved are plain state trees. Names are loaded on first
use: listing, checking and choosing checkpoints needs neither torch nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.checkpoint.alone import write_checkpoint
    from hpctrain.checkpoint.catalog import Entry
    from hpctrain.checkpoint.comparing import Cut, differences
    from hpctrain.checkpoint.exporting import export, import_torch
    from hpctrain.checkpoint.finding import find_checkpoint, load_weights
    from hpctrain.checkpoint.retention import Keep
    from hpctrain.checkpoint.store import Loaded, Store
    from hpctrain.checkpoint.stores import (
        CheckpointStore,
        list_checkpoints,
        read_checkpoint,
        store_class,
        verify,
    )
    from hpctrain.pieces import Piece, Region

__all__ = [
    "CheckpointStore",
    "Cut",
    "Entry",
    "Keep",
    "Loaded",
    "Piece",
    "Region",
    "Store",
    "differences",
    "export",
    "find_checkpoint",
    "import_torch",
    "list_checkpoints",
    "load_weights",
    "read_checkpoint",
    "store_class",
    "verify",
    "write_checkpoint",
]

__getattr__ = lazy(
    __name__,
    {
        ".alone": ("write_checkpoint",),
        ".catalog": ("Entry",),
        ".comparing": ("Cut", "differences"),
        ".exporting": ("export", "import_torch"),
        ".finding": ("find_checkpoint", "load_weights"),
        ".retention": ("Keep",),
        ".store": ("Loaded", "Store"),
        ".stores": (
            "CheckpointStore",
            "list_checkpoints",
            "read_checkpoint",
            "store_class",
            "verify",
        ),
        "hpctrain.pieces": ("Piece", "Region"),
    },
)
