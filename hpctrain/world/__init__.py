"""Floor 1: ranks, launchers, cores, devices, and how ranks meet."""

from __future__ import annotations

from hpctrain.world.agreement import agree, roll_call
from hpctrain.world.joining import init
from hpctrain.world.launcher import Launch, detect
from hpctrain.world.topology import Place, Rooms
from hpctrain.world.watching import Watching, takes_timeout
from hpctrain.world.world import RankInfo, World

__all__ = [
    "Launch",
    "Place",
    "RankInfo",
    "Rooms",
    "Watching",
    "World",
    "agree",
    "detect",
    "init",
    "roll_call",
    "takes_timeout",
]
