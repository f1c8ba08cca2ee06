"""A job as an MPIJob of Kubernetes' MPI operator (kubeflow.org/v2beta1). Rendered only.

The fields are those of mpi-operator 0.6: pkg/apis/kubeflow/v2beta1/types.go, and what its
validation requires. hpctrain submits nothing to Kubernetes: `kubectl create -f` does.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from hpctrain.batch_systems.job import PlannedJob, Template
from hpctrain.batch_systems.system import BatchSystem
from hpctrain.errors import ConfigError

__all__ = ["Kubernetes"]

_IMPLEMENTATIONS = {"openmpi": "OpenMPI", "mpich": "MPICH"}
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LONGEST_LABEL = 63
# What a manifest says; of all other fields of a request a job would know nothing.
_WRITTEN = {
    *("commands", "walltime_s", "name", "num_nodes", "ranks_per_node", "cpus_per_rank"),
    *("gpus_per_node", "memory_mib", "template", "mpi", "partition", "qos", "max_requeues"),
    *("environment", "image", "script"),
}


class Kubernetes(BatchSystem):
    """Kubernetes, for which a job is a manifest and no script; most options mean nothing to it."""

    name = "kubernetes"
    title = "Kubernetes"
    templates = (
        Template(
            name="k8s-mpijob",
            batch="kubernetes",
            launcher="mpirun",
            mpis=("openmpi", "mpich"),
            needs_image=True,
            suffix=".yaml",
        ),
    )

    @property
    def not_submitted(self) -> str:
        """The manifest is written, and started by kubectl."""
        return (
            "hpctrain does not submit to Kubernetes; write the manifest with `hpctrain job render "
            "-o job.yaml`, and start it with `kubectl create -f job.yaml`"
        )

    def manifest(self, plan: PlannedJob) -> dict[str, object]:
        """The fields of an MPIJob.

        Raises:
            ConfigError: an option that has no meaning there, a name that Kubernetes refuses, or a
                path that is one of a script, as where the job is to be submitted.
        """
        self._check_request(plan)
        request = plan.request
        environment = plan.environment
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        limits: dict[str, str] = {}
        if plan.cpus_per_rank:
            limits["cpu"] = str(plan.ranks_per_node * plan.cpus_per_rank)
        if plan.memory_mib:
            limits["memory"] = f"{plan.memory_mib}Mi"
        if plan.gpus_per_node:
            limits[plan.site.gpu_resource] = str(plan.gpus_per_node)
        words = [*self.launch_words(plan), *_forwarded(plan, environment), *request.commands[0]]
        variables = environment | (as_root if plan.mpi == "openmpi" else {})
        return {
            "command": [_literal(word) for word in words],
            "environment": {name: _literal(value) for name, value in variables.items()},
            "implementation": _IMPLEMENTATIONS[plan.mpi],
            "limits": limits,
        }

    def _check_request(self, plan: PlannedJob) -> None:
        """Refuse what a manifest cannot say, instead of leaving it out."""
        request: Any = plan.request
        if request.script and not request.script.endswith((".yaml", ".yml")):
            raise ConfigError(self.not_submitted)
        for entry in dataclasses.fields(request):
            default = entry.default
            if default is dataclasses.MISSING and entry.default_factory is not dataclasses.MISSING:
                default = entry.default_factory()
            given = getattr(request, entry.name)
            if entry.name not in _WRITTEN and given != default:
                raise ConfigError(
                    f"{entry.name} = {given!r} is not supported in an MPIJob; remove it, or put "
                    "it into the image"
                )
        last = f"{request.name}-worker-{request.num_nodes - 1}"
        if not _LABEL.fullmatch(request.name) or len(last) > _LONGEST_LABEL:
            raise ConfigError(
                f"job name {request.name!r} is not valid for Kubernetes, whose pods would be "
                f"called {last}; use small letters, digits and -, and at most {_LONGEST_LABEL} in "
                "all"
            )


def _forwarded(plan: PlannedJob, environment: dict[str, str]) -> list[str]:
    """Open MPI's ranks on other pods get only the variables that are named to mpirun."""
    if plan.mpi != "openmpi":
        return []
    return [word for name in environment for word in ("-x", name)]


def _literal(text: str) -> str:
    """Kubernetes puts variables in for $(NAME), and one $ for two."""
    return text.replace("$", "$$")
