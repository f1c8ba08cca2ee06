"""Floor 3: how weights are updated when ranks share the work: of a node, or over messages."""

from __future__ import annotations

from hpctrain.update.pieces import flat_memory
from hpctrain.update.sharded import ShardedUpdate
from hpctrain.update.sharing import shards_by, some_names
from hpctrain.update.sliced import SlicedUpdate, has_sliced_state, slice_of

__all__ = [
    "ShardedUpdate",
    "SlicedUpdate",
    "flat_memory",
    "has_sliced_state",
    "shards_by",
    "slice_of",
    "some_names",
]
