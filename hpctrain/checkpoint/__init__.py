"""Floor 3: checkpoints: complete or not there, read by any number of ranks, never a pickle.

Independent of replicas and loaders: it saves plain state trees. Names are loaded on first
use: listing, checking and choosing checkpoints needs neither torch nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.checkpoint.directory import Entry, Keep
    from hpctrain.checkpoint.layout import Item, choose_ranks, divide
    from hpctrain.checkpoint.loading import Cut, Loaded, differences
    from hpctrain.checkpoint.offline import (
        export,
        import_torch,
        load_weights,
        read_checkpoint,
        write_checkpoint,
    )
    from hpctrain.checkpoint.store import Store
    from hpctrain.checkpoint.stores import (
        CheckpointStore,
        checkpoints_of,
        find_checkpoint,
        list_checkpoints,
        store_class,
        verify,
    )
    from hpctrain.checkpoint.tree import flatten
    from hpctrain.pieces import Piece, Region

__all__ = [
    "CheckpointStore",
    "Cut",
    "Entry",
    "Item",
    "Keep",
    "Loaded",
    "Piece",
    "Region",
    "Store",
    "checkpoints_of",
    "choose_ranks",
    "differences",
    "divide",
    "export",
    "find_checkpoint",
    "flatten",
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
        ".directory": ("Entry", "Keep"),
        ".layout": ("Item", "choose_ranks", "divide"),
        ".loading": ("Cut", "Loaded", "differences"),
        ".offline": (
            "export",
            "import_torch",
            "load_weights",
            "read_checkpoint",
            "write_checkpoint",
        ),
        ".store": ("Store",),
        ".stores": (
            "CheckpointStore",
            "checkpoints_of",
            "find_checkpoint",
            "list_checkpoints",
            "store_class",
            "verify",
        ),
        ".tree": ("flatten",),
        "hpctrain.pieces": ("Piece", "Region"),
    },
)
