"""The launchers of MPI, which work under every batch system: their variables and launch lines.

A batch system's own launcher (srun, jsrun, flux run) is in that system's module, in the same form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.batch_systems.job import PlannedJob

__all__ = ["MPI_LAUNCHERS", "LauncherRow", "local_rank_variable", "node_words", "rank_words"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherRow:
    """The variables one launcher sets. Where several names are given, the first one set counts."""

    name: str
    title: str
    present: tuple[str, ...]
    """All of these must be set for the row to match."""
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    tasks_per_node: str = ""
    """A list of the tasks on each node, read by `read_counts` at the position `node_id`."""
    read_counts: Callable[[str], list[int]] | None = None
    node_id: str = ""
    starts_mpi: bool = True


MPI_LAUNCHERS: tuple[LauncherRow, ...] = (
    LauncherRow(
        name="openmpi",
        title="Open MPI mpirun",
        present=("OMPI_COMM_WORLD_RANK",),
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    LauncherRow(
        name="mvapich",
        title="MVAPICH2 mpirun_rsh",
        present=("MV2_COMM_WORLD_RANK",),
        rank=("MV2_COMM_WORLD_RANK",),
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    LauncherRow(
        name="pals",
        title="Cray PALS mpiexec",
        present=("PALS_LOCAL_RANKID",),
        rank=("PALS_RANKID", "PMI_RANK"),
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE",),
        node_id="PALS_NODEID",
    ),
    LauncherRow(
        name="hydra",
        title="MPICH or Intel MPI mpiexec",
        present=("PMI_RANK", "MPI_LOCALRANKID"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    LauncherRow(
        name="torchrun",
        title="torchrun",
        present=("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        starts_mpi=False,
    ),
)
_ROW_OF = {"pals": "pals", "mpich": "hydra", "openmpi": "openmpi"}


def rank_words(plan: PlannedJob) -> list[str]:
    """The words of mpirun or mpiexec that start all ranks. Pure."""
    words = [plan.template.launcher, "-n", str(plan.num_ranks)]
    words += _per_node(plan.mpi, plan.ranks_per_node)
    if plan.mpi == "pals":
        if plan.site.cpu_masks:
            lists = ":".join(plan.site.cpu_masks[: plan.ranks_per_node])
            words += ["--cpu-bind", f"list:{lists}"]
        elif plan.cpus_per_rank:
            words += ["--depth", str(plan.cpus_per_rank), "--cpu-bind", "depth"]
    return words


def node_words(plan: PlannedJob) -> list[str]:
    """The words of mpirun or mpiexec that start one process on every node. Pure."""
    return [plan.template.launcher, "-n", str(plan.request.num_nodes), *_per_node(plan.mpi, 1)]


def local_rank_variable(mpi: str) -> str:
    """The variable with which an MPI's launcher gives a rank its place on the node."""
    return next(row.local_rank[0] for row in MPI_LAUNCHERS if row.name == _ROW_OF[mpi])


def _per_node(mpi: str, count: int) -> list[str]:
    if mpi == "openmpi":  # which binds small jobs to one core a rank unless told otherwise
        return ["--map-by", f"ppr:{count}:node", "--bind-to", "none"]
    return ["--ppn" if mpi == "pals" else "-ppn", str(count)]
