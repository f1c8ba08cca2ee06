"""Combines a request and a site: makes every choice, and refuses what is incompatible."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.batch_systems import (
    BatchSystem,
    Template,
    find_system,
    find_template,
    format_clock,
    parse_duration,
    parse_memory,
)
from hpctrain.errors import ConfigError
from hpctrain.exit_codes import REQUEUE
from hpctrain.freed_memory import launch_variables
from hpctrain.submit.limits import check_limits
from hpctrain.submit.request import Request
from hpctrain.submit.site import Site

__all__ = ["JobPlan", "make_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """What will be in the script, with nothing left open."""

    request: Request
    site: Site
    template: Template
    mpi: str
    ranks_per_node: int
    cpus_per_rank: int | None
    gpus_per_node: int
    memory_mib: int | None
    """Per node."""
    partition: str
    account: str
    qos: str
    constraint: str

    @property
    def system(self) -> BatchSystem:
        """The batch system that the template is for."""
        return find_system(self.template.batch)

    @property
    def num_ranks(self) -> int:
        """Ranks on all nodes together."""
        return self.request.num_nodes * self.ranks_per_node

    @property
    def restart_codes(self) -> tuple[int, ...]:
        """Exit codes after which the script runs the job again, while restarts are left."""
        return tuple(sorted({REQUEUE, *self.request.restart_on}))

    @property
    def is_array(self) -> bool:
        """Whether there are several tasks, numbered by an index."""
        return self.request.array_size is not None

    @property
    def queue(self) -> str:
        """The queue whose limits hold: the partition, or the qos at sites that go by it."""
        return self.qos if self.site.queue_by == "qos" else self.partition

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the site, then those of the job."""
        merged = dict(self.site.environment)
        if self.request.num_nodes > 1:
            merged.update(self.site.multi_node_environment)
        if self.cpus_per_rank is not None:
            threads = max(1, self.cpus_per_rank // self.site.threads_per_core)
            merged.setdefault("OMP_NUM_THREADS", str(threads))
        if not self.gpus_per_node:
            merged = launch_variables({**merged, **dict(self.request.environment)}) | merged
        return merged | dict(self.request.environment)


def make_plan(request: Request, site: Site) -> JobPlan:
    """Decide everything the request left to the site.

    Raises:
        ConfigError: the site has no such thing, or the batch system cannot do it.
    """
    name = request.template or site.template
    template = find_template(name)
    if template.batch != find_template(site.template).batch:
        raise ConfigError(
            f"template {name} is for {template.batch}, and {site.name} has "
            f"{find_template(site.template).batch}; leave --template out or choose another site"
        )
    of_site = site.default_gpus_per_node
    default = site.gpus_per_node if of_site is None else of_site
    gpus = default if request.gpus_per_node is None else request.gpus_per_node
    if gpus > site.gpus_per_node:
        raise ConfigError(
            f"{gpus} GPUs per node were requested, and {site.title} has {site.gpus_per_node}; "
            "request at most that many, or correct gpus_per_node in the site's profile"
        )
    plan = JobPlan(
        request=request,
        site=site,
        template=template,
        mpi=_choose_mpi(request, site, template),
        ranks_per_node=request.ranks_per_node or _ranks(site, gpus),
        cpus_per_rank=request.cpus_per_rank or site.cpus_per_rank,
        gpus_per_node=gpus,
        memory_mib=request.memory_mib or _memory(site, gpus),
        partition=request.partition or site.partition,
        account=request.account or site.account,
        qos=request.qos or site.qos,
        constraint=request.constraint or site.constraint,
    )
    _check(plan)
    return plan


def _ranks(site: Site, gpus: int) -> int:
    if 0 < gpus < site.gpus_per_node:
        return gpus
    return site.ranks_per_node or gpus or 1


def _memory(site: Site, gpus: int) -> int | None:
    """The share of a node's memory that goes with these GPUs."""
    if not site.memory:
        return None
    share = gpus or site.gpus_per_node
    return max(1, parse_memory(site.memory) * share // (site.gpus_per_node or 1))


def _choose_mpi(request: Request, site: Site, template: Template) -> str:
    of_site = site.mpi if site.mpi in template.mpis else ""
    mpi = request.mpi or of_site or (template.mpis[0] if template.mpis else "")
    if mpi not in (template.mpis or ("",)):
        known = ", ".join(template.mpis) or "nothing: leave --mpi out"
        raise ConfigError(
            f"--mpi {mpi} is not supported by template {template.name}; choose from {known}"
        )
    return mpi


def _check(plan: JobPlan) -> None:
    request, site = plan.request, plan.site
    if site.max_walltime and request.walltime_s > parse_duration(site.max_walltime):
        raise ConfigError(
            f"a walltime of {format_clock(request.walltime_s)} is more than the "
            f"{site.max_walltime} that {site.title} allows; request less and requeue"
        )
    check_limits(
        site.queues,
        plan.queue,
        num_nodes=request.num_nodes,
        walltime_s=request.walltime_s,
        site=site.title,
        option=site.queue_by,
    )
    if site.needs_account and not plan.account:
        raise ConfigError(f"{site.title} charges every job to a project; give --account")
    if plan.template.needs_image and request.image is None:
        raise ConfigError(f"template {plan.template.name} needs a container image; give --image")
    if request.image is not None and not plan.template.needs_image:
        others = [each.name for each in plan.system.templates if each.needs_image]
        cure = f"use --template {' or '.join(others)}" if others else "leave --image out"
        raise ConfigError(f"template {plan.template.name} starts no container; {cure}")
    if site.cpu_masks and plan.ranks_per_node > len(site.cpu_masks):
        raise ConfigError(
            f"{plan.ranks_per_node} ranks per node were requested, and {site.title} has cores for "
            f"{len(site.cpu_masks)}; request at most that many"
        )
    if (by_rank := _one_gpu_each(plan)) and 0 < plan.gpus_per_node != plan.ranks_per_node:
        raise ConfigError(
            f"{site.title} gives each rank {by_rank}, so {plan.ranks_per_node} ranks per node and "
            f"{plan.gpus_per_node} GPUs per node are incompatible; make them equal"
        )
    if site.gpu_visibility == "local-rank" and 0 < plan.gpus_per_node < plan.ranks_per_node:
        raise ConfigError(
            f"{site.title} gives each rank the GPU of its number, so {plan.ranks_per_node} ranks "
            f"per node need as many GPUs, not {plan.gpus_per_node}; request fewer ranks"
        )
    plan.system.check(plan)


def _one_gpu_each(plan: JobPlan) -> str:
    if plan.system.one_gpu_per_rank or plan.site.gpu_request == "gpus-per-task":
        return "one GPU"
    return "a GPU by its index" if plan.site.gpu_visibility == "reversed" else ""
