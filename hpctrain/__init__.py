"""hpctrain: a PyTorch script written for one device trains on a whole supercomputer.

Names are loaded on first use, so that importing the package costs nothing and needs neither torch
nor MPI: a login node can render jobs, and `hpctrain --help` answers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain import metrics
    from hpctrain.checkpoint import Keep, Store
    from hpctrain.connection import Connection, connect, init
    from hpctrain.data import Loader, Shard, files, gather, reshuffle, scatter, share, stage
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
    from hpctrain.faults import Sentinel
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
    from hpctrain.train import Trainer
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

__getattr__ = lazy(
    __name__,
    {
        ".checkpoint": ("Keep", "Store"),
        ".connection": ("Connection", "connect", "init"),
        ".data": ("Loader", "Shard", "files", "gather", "reshuffle", "scatter", "share", "stage"),
        ".errors": (
            "CheckpointError",
            "CollectiveError",
            "ConfigError",
            "DataError",
            "DriftError",
            "HpcTrainError",
            "InstallError",
            "JobError",
            "LaunchError",
            "NonFiniteError",
            "TimedOutError",
        ),
        ".faults": ("Sentinel",),
        ".inference": ("quantize_int8",),
        ".metrics": (),
        ".optim": (
            "EMA",
            "LAMB",
            "LARS",
            "Recipe",
            "average_batchnorm",
            "checkpoint_activations",
            "split_parameters",
            "sync_batchnorm",
        ),
        ".precision": ("LossScaling",),
        ".replica": ("Replica", "distribute"),
        ".saver": ("Saver",),
        ".train": ("Trainer",),
        ".world": ("World", "agree"),
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
