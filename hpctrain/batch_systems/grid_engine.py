"""Grid Engine, which is recognised inside its jobs and by `hpctrain doctor`, and no more."""

from __future__ import annotations

from hpctrain.batch_systems.system import BatchSystem

__all__ = ["GridEngine"]


class GridEngine(BatchSystem):
    """Grid Engine."""

    name = "grid-engine"
    title = "Grid Engine"
    tools = ("qsub",)
    job_variables = ("JOB_ID", "PE_HOSTFILE")  # the first alone is set by others too
