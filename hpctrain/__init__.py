"""hpctrain: a PyTorch script written for one device trains on a whole supercomputer.

Names are loaded on first use, so that importing the package is fast and needs neither torch nor
MPI: a login node can render jobs, and `hpctrain --help` is immediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain import data, errors, inference, metrics, nn, optim, precision
    from hpctrain.automatic_grid import AutoGrid, auto_grid
    from hpctrain.checkpoint import Keep, Store
    from hpctrain.connection import connect, init
    from hpctrain.data import Loader, Shard, files, gather, reshuffle, scatter, share, stage
    from hpctrain.faults import Sentinel
    from hpctrain.grid import Grid
    from hpctrain.replica import Replica, distribute
    from hpctrain.saver import Saver
    from hpctrain.splitting import split
    from hpctrain.train import Trainer
    from hpctrain.world import World, agree

__version__ = "0.1.0"

__all__ = [
    "AutoGrid",
    "Grid",
    "Keep",
    "Loader",
    "Replica",
    "Saver",
    "Sentinel",
    "Shard",
    "Store",
    "Trainer",
    "World",
    "__version__",
    "agree",
    "auto_grid",
    "connect",
    "data",
    "distribute",
    "errors",
    "files",
    "gather",
    "inference",
    "init",
    "metrics",
    "nn",
    "optim",
    "precision",
    "reshuffle",
    "scatter",
    "share",
    "split",
    "stage",
]

__getattr__ = lazy(
    __name__,
    {
        ".automatic_grid": ("AutoGrid", "auto_grid"),
        ".checkpoint": ("Keep", "Store"),
        ".connection": ("connect", "init"),
        ".data": ("Loader", "Shard", "files", "gather", "reshuffle", "scatter", "share", "stage"),
        ".faults": ("Sentinel",),
        ".grid": ("Grid",),
        ".replica": ("Replica", "distribute"),
        ".saver": ("Saver",),
        ".splitting": ("split",),
        ".train": ("Trainer",),
        ".world": ("World", "agree"),
    },
    modules=("data", "errors", "inference", "metrics", "nn", "optim", "precision"),
    moved={
        ".connection": ("Connection",),
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
            "StageError",
            "TimedOutError",
        ),
        ".inference": ("quantize_int8",),
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
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
