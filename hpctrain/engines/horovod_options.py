"""Horovod's switches as one typed value, and whether the Horovod that is installed can be used."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, fields
from importlib import metadata, util

from hpctrain.errors import ConfigError

__all__ = [
    "BUILD",
    "UNKNOWN_HOROVOD",
    "HorovodOptions",
    "HorovodState",
    "probe_horovod",
    "to_environment",
]

BUILD = "hpctrain horovod build"
_RECORD = "hpctrain-build.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class HorovodOptions:
    """How Horovod works inside. None keeps the value of Horovod or of the user's environment.

    They are read once, when Horovod starts, so all engines of a process share them.
    """

    fusion_threshold_bytes: int | None = None
    """The most bytes that are fused into one message (128 MiB by default); 0 fuses nothing."""
    cycle_time_ms: float | None = None
    """How often Horovod checks for tensors that are ready on all ranks (1 ms by default)."""
    cache_capacity: int | None = None
    """How many negotiations are cached (1024 by default); 0 negotiates each time."""
    group_fusion: bool | None = None
    """Whether tensors of different groups may be fused together (they may by default)."""
    hierarchical_allreduce: bool | None = None
    """Combine inside each node by NCCL first, then between nodes by MPI."""
    hierarchical_allgather: bool | None = None
    """Gather through one shared-memory copy per node."""
    torus_allreduce: bool | None = None
    """Combine inside each node and between nodes, both by NCCL."""
    num_nccl_streams: int | None = None
    """How many NCCL streams, so how many collectives at a time (1 by default)."""
    batch_device_copies: bool | None = None
    """Copy into the fusion buffer by one kernel instead of one per tensor (the default)."""
    adasum_chunk_bytes: int | None = None
    """The size of the pieces in which Adasum exchanges between nodes (64 MiB by default)."""
    autotune: bool | None = None
    """Let Horovod look for the fusion threshold and cycle time while training."""
    autotune_log: str | None = None
    """A CSV file for what autotune tried; needs `autotune=True`."""
    autotune_warmup_samples: int | None = None
    """How many first samples autotune discards (3 by default); needs `autotune=True`."""
    autotune_steps_per_sample: int | None = None
    """How many steps autotune measures each setting (10 by default); needs `autotune=True`."""
    timeline: str | None = None
    """A file for Horovod's trace of every tensor, for chrome://tracing."""

    def __post_init__(self) -> None:
        """Refuse what is out of range and what does not go together."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"HorovodOptions: {name}={value} must be at least {least}")
        if self.cycle_time_ms is not None and self.cycle_time_ms <= 0:
            raise ConfigError(f"HorovodOptions: cycle_time_ms={self.cycle_time_ms} must be above 0")
        if self.hierarchical_allreduce and self.torus_allreduce:
            raise ConfigError(
                "HorovodOptions: hierarchical_allreduce and torus_allreduce are mutually "
                "exclusive; choose one"
            )
        if not self.autotune:
            for name in _AUTOTUNE_ONLY:
                if getattr(self, name) is not None:
                    raise ConfigError(f"HorovodOptions: {name} has no effect without autotune=True")


_LEAST = {
    "fusion_threshold_bytes": 0,
    "cache_capacity": 0,
    "num_nccl_streams": 1,
    "adasum_chunk_bytes": 1,
    "autotune_warmup_samples": 0,
    "autotune_steps_per_sample": 1,
}
_AUTOTUNE_ONLY = ("autotune_log", "autotune_warmup_samples", "autotune_steps_per_sample")
_VARIABLES = {
    "fusion_threshold_bytes": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "group_fusion": "HOROVOD_DISABLE_GROUP_FUSION",
    "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "hierarchical_allgather": "HOROVOD_HIERARCHICAL_ALLGATHER",
    "torus_allreduce": "HOROVOD_TORUS_ALLREDUCE",
    "num_nccl_streams": "HOROVOD_NUM_NCCL_STREAMS",
    "batch_device_copies": "HOROVOD_BATCH_D2D_MEMCOPIES",
    "adasum_chunk_bytes": "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
    "autotune": "HOROVOD_AUTOTUNE",
    "autotune_log": "HOROVOD_AUTOTUNE_LOG",
    "autotune_warmup_samples": "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "autotune_steps_per_sample": "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "timeline": "HOROVOD_TIMELINE",
}


def to_environment(options: HorovodOptions) -> dict[str, str]:
    """The variables to set while Horovod starts; options that are None set none."""
    found = {}
    for option in fields(options):
        value = getattr(options, option.name)
        if value is None:
            continue
        if option.name == "group_fusion":  # Horovod's variable says the opposite
            value = not value
        variable = _VARIABLES[option.name]
        found[variable] = str(int(value)) if isinstance(value, bool) else str(value)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class HorovodState:
    """What was found.

    Attributes:
        built: Whether it can be imported and speaks MPI.
        nccl: Whether it was built with NCCL.
        why: Why it is not built, in words; empty when it is.
    """

    built: bool
    nccl: bool = False
    why: str = ""


UNKNOWN_HOROVOD = HorovodState(built=False, why="Horovod was not checked")


def probe_horovod() -> HorovodState:
    """Import Horovod, unless it is missing or was built for another torch (which may crash)."""
    if util.find_spec("horovod") is None:
        return HorovodState(built=False, why="Horovod is not installed")
    if trouble := _bound_to_another_torch():
        return HorovodState(built=False, why=trouble)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own imports warn of what setuptools will drop
            import horovod.torch as hvd
    except Exception as error:  # whatever a half-built package raises
        return HorovodState(built=False, why=f"`import horovod.torch` fails: {error}")
    if not hvd.mpi_built():
        return HorovodState(built=False, why="Horovod was built without MPI")
    return HorovodState(built=True, nccl=bool(hvd.nccl_built()))


def _bound_to_another_torch() -> str:
    """What the build's own record says against it; nothing when hpctrain did not build it."""
    import torch

    try:
        text = metadata.distribution("horovod").read_text(_RECORD)
        bound = json.loads(text) if text else {}
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    now = {"torch": str(torch.__version__), "torch_build": str(torch.version.git_version)}
    for name, value in now.items():
        if bound.get(name, value) != value:
            return f"Horovod was built for {name} {bound[name]}, and this is {value}"
    return ""
