"""Floor 4: where engine, fusion and optimizer meet.

Names are loaded on first use: choosing how a replica works (`policy`) needs neither torch nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.replica.distributing import distribute, optimizer_facts
    from hpctrain.replica.equal_ranks import broadcast_tensors, check_equal, check_structure
    from hpctrain.replica.horovod_settings import HorovodTraining
    from hpctrain.replica.policy import (
        Choice,
        ChosenUpdate,
        OptimizerFacts,
        Options,
        ReplicaFacts,
        choose,
        choose_update,
    )
    from hpctrain.replica.replica import Replica, Step

__all__ = [
    "Choice",
    "ChosenUpdate",
    "HorovodTraining",
    "OptimizerFacts",
    "Options",
    "Replica",
    "ReplicaFacts",
    "Step",
    "broadcast_tensors",
    "check_equal",
    "check_structure",
    "choose",
    "choose_update",
    "distribute",
    "optimizer_facts",
]

__getattr__ = lazy(
    __name__,
    {
        ".replica": ("Replica", "Step"),
        ".distributing": (
            "distribute",
            "optimizer_facts",
        ),
        ".horovod_settings": ("HorovodTraining",),
        ".equal_ranks": ("broadcast_tensors", "check_equal", "check_structure"),
        ".policy": (
            "Choice",
            "ChosenUpdate",
            "ReplicaFacts",
            "OptimizerFacts",
            "Options",
            "choose",
            "choose_update",
        ),
    },
)
