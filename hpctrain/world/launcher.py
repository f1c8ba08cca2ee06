"""Who started this process: one row of variable names per launcher and per batch system.

MPI itself is the truth about ranks; these variables are the cross-check. Rows are tried from the
most specific to the least, Slurm last: `mpirun` inside `sbatch` leaks the variables of its own step
into every rank, where several ranks all see SLURM_PROCID=0.

This is the only module that reads the environment of a running job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import LaunchError
from hpctrain.world.bench import Asked, parse_asked

__all__ = [
    "BATCH_SYSTEMS",
    "BENCH_VARIABLE",
    "CHAOS_VARIABLE",
    "LAUNCHERS",
    "Launch",
    "LauncherRow",
    "current_launch",
    "detect",
]

BENCH_VARIABLE = "HPCTRAIN_BENCH"
CHAOS_VARIABLE = "HPCTRAIN_CHAOS"
"""Where a sweep says what it asks for."""


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
    """A list in Slurm's form (`4(x2),1`), read at the position `node_id`."""
    node_id: str = ""
    starts_mpi: bool = True


LAUNCHERS: tuple[LauncherRow, ...] = (
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
        name="jsrun",
        title="jsrun",
        present=("JSM_NAMESPACE_RANK",),
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    LauncherRow(
        name="flux",
        title="flux run",
        present=("FLUX_TASK_RANK",),
        rank=("FLUX_TASK_RANK",),
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
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
    LauncherRow(
        name="srun",
        title="srun",
        # The batch shell has SLURM_PROCID too; only a step has SLURM_STEP_ID.
        present=("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
        node_id="SLURM_NODEID",
    ),
)

BATCH_SYSTEMS: Mapping[str, tuple[str, ...]] = {
    # name: the variables that must be set; the first holds the job id
    "Slurm": ("SLURM_JOB_ID",),
    "PBS": ("PBS_JOBID",),
    "LSF": ("LSB_JOBID",),
    "Flux": ("FLUX_JOB_ID",),
    "Grid Engine": ("JOB_ID", "PE_HOSTFILE"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What the environment says about how this process was started."""

    row: LauncherRow | None
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    batch_system: str | None = None
    job_id: str | None = None
    num_threads: int | None = None
    """OMP_NUM_THREADS, where the user or the site set one."""
    host_suffix: str = ""
    """What a node's name gets at sites where the bare name is its address on a slow network."""
    terminal_columns: int | None = None
    """Width of the terminal behind `hpctrain run`; None when there is none."""
    control_fd: int | None = None
    """Where `hpctrain run` hears how this rank ended."""
    pmi: str | None = None
    """Which process-management interface srun offers: `pmix`, `pmi2`, or None."""
    job_index: int | None = None
    """The task of a job array, where the job id does not tell it (LSF)."""
    end_time: float | None = None
    """When the allocation ends (Unix time), where a variable says so."""
    bench: Asked | None = None
    """What a sweep asks for; None outside one."""
    chaos: str | None = None
    """What `hpctrain chaos` lets go wrong here, as `faults.injection` reads it."""
    trace_dir: str | None = None
    """Where `hpctrain run --trace` wants every rank's events."""
    cluster: str | None = None
    """Whose job ids these are, where the batch system has a name for that."""
    notes_dir: str | None = None
    """Where the job script wants to be told of checkpoints and failed hosts."""

    @property
    def title(self) -> str:
        """The launcher's name for people."""
        return self.row.title if self.row else "no launcher"

    def network_name(self, host: str) -> str:
        """The name by which other nodes reach a host: `jwb0001` is `jwb0001i` at JUWELS."""
        return f"{host.partition('.')[0]}{self.host_suffix}" if self.host_suffix else host


def detect(environ: Mapping[str, str]) -> Launch:
    """Read how a process was started from its environment. Pure.

    Raises:
        LaunchError: a launcher's variable is set but is not a number, or its size is missing.
    """
    row = next((r for r in LAUNCHERS if all(name in environ for name in r.present)), None)
    batch = next((b for b, names in BATCH_SYSTEMS.items() if all(n in environ for n in names)), "")
    job_id = environ[BATCH_SYSTEMS[batch][0]] if batch else None
    rank, size, local_rank, local_size = _places(row, environ) if row else (0, 1, None, None)
    return Launch(
        row=row,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        batch_system=batch or None,
        job_id=job_id,
        num_threads=_threads(environ),
        host_suffix=environ.get("HPCTRAIN_HOST_SUFFIX", ""),
        terminal_columns=_number(environ, "HPCTRAIN_COLUMNS"),
        control_fd=_number(environ, "HPCTRAIN_CONTROL_FD"),
        pmi=_pmi(environ),
        # 0 is LSF's word for "no array".
        job_index=(_number(environ, "LSB_JOBINDEX") or None) if batch == "LSF" else None,
        end_time=_end_time(environ, batch),
        bench=parse_asked(environ[BENCH_VARIABLE]) if environ.get(BENCH_VARIABLE) else None,
        chaos=environ.get(CHAOS_VARIABLE) or None,
        trace_dir=environ.get("HPCTRAIN_TRACE") or None,
        cluster=_cluster(environ, batch),
        notes_dir=environ.get("HPCTRAIN_NOTES") or None,
    )


def current_launch() -> Launch:
    """Read how this process was started."""
    return detect(os.environ)


def _places(
    row: LauncherRow, environ: Mapping[str, str]
) -> tuple[int, int, int | None, int | None]:
    rank = _first_number(environ, row.rank)
    size = _first_number(environ, row.size)
    if rank is None or size is None:
        raise LaunchError(
            f"{row.title} set {row.present[0]} but none of {', '.join(row.rank + row.size)}; the "
            "environment is incomplete: start the job with mpirun, mpiexec, srun or `hpctrain run`"
        )
    local_size = _first_number(environ, row.local_size)
    if local_size is None and row.tasks_per_node in environ:
        counts = parse_task_counts(environ[row.tasks_per_node])
        node = _number(environ, row.node_id)
        if node is not None and 0 <= node < len(counts):
            local_size = counts[node]
    return rank, size, _first_number(environ, row.local_rank), local_size


def parse_task_counts(text: str) -> list[int]:
    """Expand Slurm's list of tasks per node: `2(x3),1` becomes `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of counts like '4(x2),1'; "
                "unset it or start the step again"
            )
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def _first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((_number(environ, name) for name in names if name in environ), None)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a whole number; unset it or mend it") from None


def _threads(environ: Mapping[str, str]) -> int | None:
    # OpenMP allows a list with one entry per nesting level; the first is ours.
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not first:
        return None
    if not first.isdecimal() or int(first) < 1:
        raise LaunchError(f"OMP_NUM_THREADS={first!r} is not a positive number; unset or mend it")
    return int(first)


def _end_time(environ: Mapping[str, str], batch: str) -> float | None:
    # The first is for job scripts of systems that do not tell; Slurm sets the second from 23.02 on.
    given = _number(environ, "HPCTRAIN_END_TIME")
    if given is None and batch == "Slurm":
        given = _number(environ, "SLURM_JOB_END_TIME")
    return float(given) if given is not None and given > 0 else None


def _cluster(environ: Mapping[str, str], batch: str) -> str | None:
    if batch == "Slurm":
        return environ.get("SLURM_CLUSTER_NAME") or None
    if batch == "PBS":  # 123.server
        return environ["PBS_JOBID"].partition(".")[2] or None
    return None


def _pmi(environ: Mapping[str, str]) -> str | None:
    if "PMIX_NAMESPACE" in environ:
        return "pmix"
    return "pmi2" if "PMI_FD" in environ or "PMI_RANK" in environ else None
