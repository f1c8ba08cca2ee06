"""Whether the Horovod that is installed can be used here."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from importlib import metadata, util

__all__ = ["BUILD", "HorovodState", "probe_horovod"]

BUILD = "hpctrain horovod build"
_RECORD = "hpctrain-build.json"


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
