"""Floor 2: engines: the collectives on torch tensors, several of them behind one interface.

Names are loaded on first use: choosing an engine and asking what it can do needs neither torch nor
MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.engines import differentiable
    from hpctrain.engines.base import Engine, EngineWatch, EngineWatchdog, Pending
    from hpctrain.engines.between_nodes import BetweenNodes
    from hpctrain.engines.choosing import ChosenEngine, choose, create, needs_horovod_state
    from hpctrain.engines.encoding import Op
    from hpctrain.engines.horovod import HorovodEngine
    from hpctrain.engines.horovod_options import (
        UNKNOWN_HOROVOD,
        HorovodOptions,
        HorovodState,
        probe_horovod,
    )
    from hpctrain.engines.mpi import MpiEngine, over_mpi
    from hpctrain.engines.node import NodeGroup
    from hpctrain.engines.registry import (
        AUTO,
        Capabilities,
        capabilities_of,
        communicating_names,
        engine_names,
    )
    from hpctrain.engines.torch_dist import MeetingPoint, open_store

__all__ = [
    "AUTO",
    "UNKNOWN_HOROVOD",
    "BetweenNodes",
    "Capabilities",
    "ChosenEngine",
    "Engine",
    "EngineWatch",
    "EngineWatchdog",
    "HorovodEngine",
    "HorovodOptions",
    "HorovodState",
    "MeetingPoint",
    "MpiEngine",
    "NodeGroup",
    "Op",
    "Pending",
    "capabilities_of",
    "choose",
    "communicating_names",
    "create",
    "differentiable",
    "engine_names",
    "needs_horovod_state",
    "open_store",
    "over_mpi",
    "probe_horovod",
]

__getattr__ = lazy(
    __name__,
    {
        ".base": ("Engine", "EngineWatch", "EngineWatchdog", "Pending"),
        ".choosing": ("ChosenEngine", "choose", "create", "needs_horovod_state"),
        ".encoding": ("Op",),
        ".horovod": ("HorovodEngine",),
        ".horovod_options": (
            "UNKNOWN_HOROVOD",
            "HorovodOptions",
            "HorovodState",
            "probe_horovod",
        ),
        ".between_nodes": ("BetweenNodes",),
        ".mpi": ("MpiEngine", "over_mpi"),
        ".node": ("NodeGroup",),
        ".registry": (
            "AUTO",
            "Capabilities",
            "capabilities_of",
            "communicating_names",
            "engine_names",
        ),
        ".torch_dist": ("MeetingPoint", "open_store"),
    },
)
