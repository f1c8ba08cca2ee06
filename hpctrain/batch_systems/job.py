"""A job from the batch system's side: the request, and what it reports afterwards.

The protocols name what a batch system may read of a planned job; `hpctrain.submit` makes the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hpctrain.batch_systems.units import format_clock
from hpctrain.log import format_bytes

__all__ = ["FINAL", "JobRequest", "JobSite", "JobState", "JobUse", "PlannedJob", "Template"]

FINAL = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """One file of `jobs/templates`, or of a batch system's own folder."""

    name: str
    """Of the file, without its suffixes."""
    batch: str
    """The name of its batch system."""
    launcher: str
    """What starts the ranks: `mpirun`, `mpiexec`, or the batch system's own."""
    mpis: tuple[str, ...]
    """Values of `mpi` that this launcher supports; () if there is only one way."""
    needs_image: bool = False
    suffix: str = ".sh"
    """Of what it renders: a script, or `.yaml` for a manifest."""


class JobRequest(Protocol):
    """The user's request (`submit.Request` has more)."""

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def num_nodes(self) -> int: ...  # noqa: D102
    @property
    def walltime_s(self) -> int: ...  # noqa: D102
    @property
    def memory_mib(self) -> int | None: ...  # noqa: D102
    @property
    def reservation(self) -> str | None: ...  # noqa: D102
    @property
    def log_dir(self) -> str: ...  # noqa: D102
    @property
    def array_size(self) -> int | None: ...  # noqa: D102
    @property
    def array_limit(self) -> int | None: ...  # noqa: D102
    @property
    def after(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def after_kind(self) -> str: ...  # noqa: D102
    @property
    def max_requeues(self) -> int: ...  # noqa: D102
    @property
    def expedite(self) -> bool: ...  # noqa: D102
    @property
    def signal(self) -> str: ...  # noqa: D102
    @property
    def signal_lead_s(self) -> int | None: ...  # noqa: D102
    @property
    def image(self) -> str | None: ...  # noqa: D102
    @property
    def script(self) -> str | None: ...  # noqa: D102


class JobSite(Protocol):
    """What the site's profile says (`submit.Site` has more)."""

    @property
    def title(self) -> str: ...  # noqa: D102
    @property
    def whole_nodes(self) -> bool: ...  # noqa: D102
    @property
    def select(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def gpu_request(self) -> str: ...  # noqa: D102
    @property
    def gpu_resource(self) -> str: ...  # noqa: D102
    @property
    def cpu_masks(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def launch_options(self) -> tuple[str, ...]: ...  # noqa: D102


class PlannedJob(Protocol):
    """A request and a site put together, with nothing left open (`submit.Plan`)."""

    @property
    def request(self) -> JobRequest: ...  # noqa: D102
    @property
    def site(self) -> JobSite: ...  # noqa: D102
    @property
    def template(self) -> Template: ...  # noqa: D102
    @property
    def mpi(self) -> str: ...  # noqa: D102
    @property
    def num_ranks(self) -> int: ...  # noqa: D102
    @property
    def ranks_per_node(self) -> int: ...  # noqa: D102
    @property
    def cpus_per_rank(self) -> int | None: ...  # noqa: D102
    @property
    def gpus_per_node(self) -> int: ...  # noqa: D102
    @property
    def memory_mib(self) -> int | None: ...  # noqa: D102
    @property
    def partition(self) -> str: ...  # noqa: D102
    @property
    def account(self) -> str: ...  # noqa: D102
    @property
    def qos(self) -> str: ...  # noqa: D102
    @property
    def constraint(self) -> str: ...  # noqa: D102
    @property
    def is_array(self) -> bool: ...  # noqa: D102
    @property
    def restart_codes(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def environment(self) -> dict[str, str]: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """How a job, or one task of an array, is doing."""

    job: str
    state: str
    """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT etc., for every batch system."""
    name: str = ""
    exit_code: int | None = None
    elapsed: str = ""
    restarts: int | None = None
    reason: str = ""
    log: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINAL


@dataclass(frozen=True, kw_only=True, slots=True)
class JobUse:
    """What a job was given, and what it used of it; None where that is not known."""

    job: str
    state: str
    source: str
    """Where this was read: `sacct`, or the path of a summary."""
    elapsed_s: float
    limit_s: float | None = None
    num_nodes: int = 1
    cores: int = 0
    """Of all nodes of the job."""
    busy_cores: float | None = None
    """How many were busy on average; MPI that polls while it waits counts as busy."""
    memory_bytes: int | None = None
    """Of all nodes together."""
    used_memory_bytes: int | None = None
    """The peak of all ranks together; memory that ranks share counts for each of them."""
    gpus: int = 0
    busy_gpus: float | None = None
    """How many GPUs were busy on average."""
    gpu_memory_bytes: int | None = None
    """Of one GPU."""
    used_gpu_memory_bytes: int | None = None
    """The peak of one rank on its GPU."""

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Resource, used, requested and the share, for a table."""
        kept: list[tuple[str, float | None, float | None, Callable[[Any], str]]] = [
            ("cores", self.busy_cores, self.cores, _number),
            ("memory", self.used_memory_bytes, self.memory_bytes, format_bytes),
            ("GPUs", self.busy_gpus, self.gpus, _number),
            ("memory of a GPU", self.used_gpu_memory_bytes, self.gpu_memory_bytes, format_bytes),
            ("time", self.elapsed_s, self.limit_s, lambda s: format_clock(round(s))),
        ]
        rows = []
        for what, used, given, text in kept:
            if not used and not given:
                continue
            share = f"{100 * used / given:.0f} %" if used is not None and given else ""
            words = ["not known" if value is None else text(value) for value in (used, given)]
            rows.append((what, words[0], words[1], share))
        return rows

    def shares(self) -> Mapping[str, float]:
        """Used over requested, where both are known."""
        pairs = {
            "cores": (self.busy_cores, self.cores),
            "memory": (self.used_memory_bytes, self.memory_bytes),
            "gpus": (self.busy_gpus, self.gpus),
            "gpu_memory": (self.used_gpu_memory_bytes, self.gpu_memory_bytes),
            "time": (self.elapsed_s, self.limit_s),
        }
        return {k: used / given for k, (used, given) in pairs.items() if used is not None and given}


def _number(value: float) -> str:
    return f"{value:g}" if float(value).is_integer() else f"{value:.1f}"
