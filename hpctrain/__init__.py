"""hpctrain: a PyTorch script written for one device trains on a whole supercomputer.

Names are loaded on first use, so that importing the package costs nothing and needs neither torch
nor MPI: a login node can render jobs, and `hpctrain --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.connection import Connection, connect
    from hpctrain.errors import (
        CollectiveError,
        ConfigError,
        HpcTrainError,
        InstallError,
        JobError,
        LaunchError,
    )
    from hpctrain.replica import Replica, distribute
    from hpctrain.world import World, agree, init

__version__ = "0.1.0"

__all__ = [
    "CollectiveError",
    "ConfigError",
    "Connection",
    "HpcTrainError",
    "InstallError",
    "JobError",
    "LaunchError",
    "Replica",
    "World",
    "__version__",
    "agree",
    "connect",
    "distribute",
    "init",
]

_HOME = {
    "CollectiveError": "hpctrain.errors",
    "ConfigError": "hpctrain.errors",
    "HpcTrainError": "hpctrain.errors",
    "InstallError": "hpctrain.errors",
    "JobError": "hpctrain.errors",
    "LaunchError": "hpctrain.errors",
    "Connection": "hpctrain.connection",
    "Replica": "hpctrain.replica",
    "World": "hpctrain.world",
    "connect": "hpctrain.connection",
    "distribute": "hpctrain.replica",
    "agree": "hpctrain.world",
    "init": "hpctrain.world",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
