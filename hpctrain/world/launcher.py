"""Who started this process, by its environment; `batch_systems` has the names of the variables.

MPI itself is the truth about ranks; these variables are the cross-check.

This is the only module that reads the environment of a running rank: others get a `Launch`, or
ask `environment`. The starting side (`cli`, `launch`, `bench`, `chaos`) prepares it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.batch_systems import BatchSystem, LauncherRow, detect_launcher, detect_system
from hpctrain.errors import LaunchError

__all__ = [
    "Launch",
    "current_launch",
    "detect",
    "environment",
]

_OWN_PREFIX = "HPCTRAIN_"


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
    """Suffix of node names at sites where the bare name is on a slow network."""
    terminal_columns: int | None = None
    """Width of the terminal behind `hpctrain run`; None if there is none."""
    control_fd: int | None = None
    """Where `hpctrain run` receives how this rank ended."""
    pmi: str | None = None
    """Which process-management interface srun offers: `pmix`, `pmi2`, or None."""
    job_index: int | None = None
    """The task of a job array, if the job id does not include it."""
    end_time: float | None = None
    """When the allocation ends (Unix time), where a variable says so."""
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    """hpctrain's own variables (`HPCTRAIN_...`) that are not empty, for upper floors to read."""
    trace_dir: str | None = None
    """Where every rank writes its events for `hpctrain run --trace`."""
    cluster: str | None = None
    """The cluster of these job ids, if the batch system names it."""
    notes_dir: str | None = None
    """Where the job script reads about checkpoints and failed hosts."""

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
    row, system = detect_launcher(environ), detect_system(environ)
    rank, size, local_rank, local_size = _places(row, environ) if row else (0, 1, None, None)
    return Launch(
        row=row,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        batch_system=system.title if system else None,
        job_id=environ[system.job_variables[0]] if system else None,
        num_threads=_threads(environ),
        host_suffix=environ.get("HPCTRAIN_HOST_SUFFIX", ""),
        terminal_columns=_number(environ, "HPCTRAIN_COLUMNS"),
        control_fd=_number(environ, "HPCTRAIN_CONTROL_FD"),
        pmi=_pmi(environ),
        job_index=(_number(environ, system.index_variable) or None) if system else None,
        end_time=_end_time(environ, system),
        settings={k: v for k, v in environ.items() if k.startswith(_OWN_PREFIX) and v},
        trace_dir=environ.get("HPCTRAIN_TRACE") or None,
        cluster=system.cluster(environ) if system else None,
        notes_dir=environ.get("HPCTRAIN_NOTES") or None,
    )


def current_launch() -> Launch:
    """Read how this process was started."""
    return detect(os.environ)


def environment() -> Mapping[str, str]:
    """The environment of this process, where other libraries have their settings."""
    return os.environ


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
    if local_size is None and row.read_counts is not None and row.tasks_per_node in environ:
        counts = row.read_counts(environ[row.tasks_per_node])
        node = _number(environ, row.node_id)
        if node is not None and 0 <= node < len(counts):
            local_size = counts[node]
    return rank, size, _first_number(environ, row.local_rank), local_size


def _first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((_number(environ, name) for name in names if name in environ), None)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a whole number; unset or correct it") from None


def _threads(environ: Mapping[str, str]) -> int | None:
    # OpenMP allows a list with one entry per nesting level; the first is ours.
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not first:
        return None
    if not first.isdecimal() or int(first) < 1:
        raise LaunchError(
            f"OMP_NUM_THREADS={first!r} is not a positive number; unset or correct it"
        )
    return int(first)


def _end_time(environ: Mapping[str, str], system: BatchSystem | None) -> float | None:
    # The first is for job scripts of systems that do not tell.
    given = _number(environ, "HPCTRAIN_END_TIME")
    if given is None and system is not None:
        given = _number(environ, system.end_time_variable)
    return float(given) if given is not None and given > 0 else None


def _pmi(environ: Mapping[str, str]) -> str | None:
    if "PMIX_NAMESPACE" in environ:
        return "pmix"
    return "pmi2" if "PMI_FD" in environ or "PMI_RANK" in environ else None
