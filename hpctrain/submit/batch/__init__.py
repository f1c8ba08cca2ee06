"""The batch systems: how each takes a job, names it, tells of it and ends it."""

from __future__ import annotations

from hpctrain.errors import ConfigError
from hpctrain.submit.batch.flux import Flux
from hpctrain.submit.batch.job_state import FINAL, JobState
from hpctrain.submit.batch.lsf import Lsf
from hpctrain.submit.batch.pbs import Pbs
from hpctrain.submit.batch.slurm import Slurm
from hpctrain.submit.batch.system import BatchSystem

__all__ = ["FINAL", "BatchSystem", "JobState", "find_system"]

_SYSTEMS: dict[str, BatchSystem] = {"slurm": Slurm(), "pbs": Pbs(), "lsf": Lsf(), "flux": Flux()}


def find_system(name: str) -> BatchSystem:
    """Look a batch system up by name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _SYSTEMS:
        raise ConfigError(f"no batch system {name!r}; there are {', '.join(_SYSTEMS)}")
    return _SYSTEMS[name]
