"""hpctrain: a PyTorch script written for one device trains on a whole supercomputer.

Names are loaded on first use, so that importing the package costs nothing and needs neither torch
nor MPI: a login node can render jobs, and `hpctrain --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.checkpoint import Keep, Store
    from hpctrain.connection import Connection, connect, init
    from hpctrain.data import Shard, files, gather, metrics, reshuffle, scatter, share, stage
    from hpctrain.data.loader import Loader
    from hpctrain.errors import (
        CheckpointError,
        CollectiveError,
        ConfigError,
        DataError,
        DriftError,
        HpcTrainError,
        InstallError,
        JobError,
        LaunchError,
        NonFiniteError,
        TimedOutError,
    )
    from hpctrain.faults.sentinel import Sentinel
    from hpctrain.inference import quantize_int8
    from hpctrain.optim import (
        EMA,
        LAMB,
        LARS,
        Recipe,
        average_batchnorm,
        checkpoint_activations,
        split_parameters,
        sync_batchnorm,
    )
    from hpctrain.precision import LossScaling
    from hpctrain.replica import Replica, distribute
    from hpctrain.saver import Saver
    from hpctrain.train.trainer import Trainer
    from hpctrain.world import World, agree

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "LAMB",
    "LARS",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "Connection",
    "DataError",
    "DriftError",
    "HpcTrainError",
    "InstallError",
    "JobError",
    "Keep",
    "LaunchError",
    "Loader",
    "LossScaling",
    "NonFiniteError",
    "Recipe",
    "Replica",
    "Saver",
    "Sentinel",
    "Shard",
    "Store",
    "TimedOutError",
    "Trainer",
    "World",
    "__version__",
    "agree",
    "average_batchnorm",
    "checkpoint_activations",
    "connect",
    "distribute",
    "files",
    "gather",
    "init",
    "metrics",
    "quantize_int8",
    "reshuffle",
    "scatter",
    "share",
    "split_parameters",
    "stage",
    "sync_batchnorm",
]

_HOME = {
    "CheckpointError": "hpctrain.errors",
    "CollectiveError": "hpctrain.errors",
    "ConfigError": "hpctrain.errors",
    "DataError": "hpctrain.errors",
    "DriftError": "hpctrain.errors",
    "HpcTrainError": "hpctrain.errors",
    "InstallError": "hpctrain.errors",
    "JobError": "hpctrain.errors",
    "LaunchError": "hpctrain.errors",
    "LossScaling": "hpctrain.precision",
    "NonFiniteError": "hpctrain.errors",
    "TimedOutError": "hpctrain.errors",
    "Keep": "hpctrain.checkpoint",
    "Store": "hpctrain.checkpoint",
    "Connection": "hpctrain.connection",
    "Loader": "hpctrain.data.loader",
    "Replica": "hpctrain.replica",
    "Saver": "hpctrain.saver",
    "Sentinel": "hpctrain.faults.sentinel",
    "Shard": "hpctrain.data",
    "Trainer": "hpctrain.train.trainer",
    "World": "hpctrain.world",
    "connect": "hpctrain.connection",
    "distribute": "hpctrain.replica",
    "EMA": "hpctrain.optim",
    "LAMB": "hpctrain.optim",
    "LARS": "hpctrain.optim",
    "Recipe": "hpctrain.optim",
    "average_batchnorm": "hpctrain.optim",
    "checkpoint_activations": "hpctrain.optim",
    "split_parameters": "hpctrain.optim",
    "sync_batchnorm": "hpctrain.optim",
    "quantize_int8": "hpctrain.inference",
    "files": "hpctrain.data",
    "gather": "hpctrain.data",
    "metrics": "hpctrain.data",
    "reshuffle": "hpctrain.data",
    "scatter": "hpctrain.data",
    "share": "hpctrain.data",
    "stage": "hpctrain.data",
    "agree": "hpctrain.world",
    "init": "hpctrain.connection",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
