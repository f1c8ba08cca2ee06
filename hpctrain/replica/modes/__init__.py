"""How gradients are exchanged: one file per mode, all behind the base class `Mode`."""

from __future__ import annotations

from hpctrain.replica.modes.alone import AloneMode
from hpctrain.replica.modes.arena import ArenaMode
from hpctrain.replica.modes.base import Mode, unfrozen
from hpctrain.replica.modes.gather_order import GatherOrder
from hpctrain.replica.modes.horovod import HorovodMode
from hpctrain.replica.modes.node import NodeMode
from hpctrain.replica.modes.partners import Partners, came_late
from hpctrain.replica.modes.refusing import refuse_together
from hpctrain.replica.modes.sharded import ShardedMode
from hpctrain.replica.modes.slices import SlicedMode
from hpctrain.replica.modes.stages import StagedPass, Stages

__all__ = [
    "AloneMode",
    "ArenaMode",
    "GatherOrder",
    "HorovodMode",
    "Mode",
    "NodeMode",
    "Partners",
    "ShardedMode",
    "SlicedMode",
    "StagedPass",
    "Stages",
    "came_late",
    "refuse_together",
    "unfrozen",
]
