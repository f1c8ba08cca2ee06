"""Floor 3: how weights are updated when the ranks of a node share the work."""

from __future__ import annotations

from hpctrain.update.pieces import flat_memory
from hpctrain.update.sharded import ShardedUpdate
from hpctrain.update.sharing import shards_by, some_names

__all__ = [
    "ShardedUpdate",
    "flat_memory",
    "shards_by",
    "some_names",
]
