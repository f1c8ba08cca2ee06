"""Floor 3: models whose parameters, gradients or state lie in shards over the ranks of a grid."""

from __future__ import annotations

from hpctrain.sharding.deferred import Deferred, build_deferred
from hpctrain.sharding.fsdp import (
    Sharding,
    module_facts,
    shard_model,
    sharding_of,
    trouble_with_model,
    trouble_with_torch,
)
from hpctrain.sharding.kinds import SHARDED, ShardKind, divides_state, mark_state_divided
from hpctrain.sharding.shards import (
    as_pieces,
    fit_optimizer_state,
    load_shards,
    piece_of_state,
    region_of,
    shard_like,
)
from hpctrain.sharding.units import ModuleFacts, choose_units, match_units

__all__ = [
    "SHARDED",
    "Deferred",
    "ModuleFacts",
    "ShardKind",
    "Sharding",
    "as_pieces",
    "build_deferred",
    "choose_units",
    "divides_state",
    "fit_optimizer_state",
    "load_shards",
    "mark_state_divided",
    "match_units",
    "module_facts",
    "piece_of_state",
    "region_of",
    "shard_like",
    "shard_model",
    "sharding_of",
    "trouble_with_model",
    "trouble_with_torch",
]
