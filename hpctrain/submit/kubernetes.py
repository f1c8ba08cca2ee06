"""A job as an MPIJob of Kubernetes' MPI operator (kubeflow.org/v2beta1). Rendered only.

The fields are those of mpi-operator 0.6: pkg/apis/kubeflow/v2beta1/types.go, and what its
validation requires. hpctrain hands nothing to Kubernetes: `kubectl create -f` does.
"""

from __future__ import annotations

import dataclasses
import json
import re

from hpctrain.errors import ConfigError
from hpctrain.submit.launchers import launch_words
from hpctrain.submit.plan import Plan
from hpctrain.submit.request import Request

__all__ = ["check_manifest", "manifest_context", "quote_json"]

NOT_SUBMITTED = (
    "hpctrain hands nothing to Kubernetes; write the manifest with `hpctrain job render -o "
    "job.yaml`, and start it with `kubectl create -f job.yaml`"
)
_IMPLEMENTATIONS = {"openmpi": "OpenMPI", "mpich": "MPICH"}
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LONGEST_LABEL = 63
# What a manifest says; of all other fields of a request a job would know nothing.
_WRITTEN = {
    *("commands", "walltime_s", "name", "num_nodes", "ranks_per_node", "cpus_per_rank"),
    *("gpus_per_node", "memory_mib", "template", "mpi", "partition", "qos", "max_requeues"),
    *("environment", "image", "script"),
}


def check_manifest(plan: Plan) -> None:
    """Refuse what a manifest cannot say, instead of leaving it out.

    Raises:
        ConfigError: an option that has no meaning there, a name that Kubernetes refuses, or a path
            that is one of a script, as where the job is to be submitted.
    """
    if plan.request.script and not plan.request.script.endswith((".yaml", ".yml")):
        raise ConfigError(NOT_SUBMITTED)
    for entry in dataclasses.fields(Request):
        default = entry.default
        if default is dataclasses.MISSING and entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        given = getattr(plan.request, entry.name)
        if entry.name not in _WRITTEN and given != default:
            raise ConfigError(
                f"{entry.name} = {given!r} has no place in an MPIJob; leave it out, or put it into "
                "the image"
            )
    last = f"{plan.request.name}-worker-{plan.request.num_nodes - 1}"
    if not _LABEL.fullmatch(plan.request.name) or len(last) > _LONGEST_LABEL:
        raise ConfigError(
            f"job name {plan.request.name!r} is none for Kubernetes, whose pods would be called "
            f"{last}; use small letters, digits and -, and at most {_LONGEST_LABEL} in all"
        )


def manifest_context(plan: Plan) -> dict[str, object]:
    """What the template of the manifest is filled with."""
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
    words = [*launch_words(plan), *_forwarded(plan, environment), *request.commands[0]]
    variables = environment | (as_root if plan.mpi == "openmpi" else {})
    return {
        "command": [_literal(word) for word in words],
        "environment": {name: _literal(value) for name, value in variables.items()},
        "implementation": _IMPLEMENTATIONS[plan.mpi],
        "limits": limits,
        "plan": plan,
        "request": request,
        "site": plan.site,
    }


def _forwarded(plan: Plan, environment: dict[str, str]) -> list[str]:
    """Open MPI's ranks on other pods get only the variables that are named to mpirun."""
    if plan.mpi != "openmpi":
        return []
    return [word for name in environment for word in ("-x", name)]


def _literal(text: str) -> str:
    """Kubernetes puts variables in for $(NAME), and one $ for two."""
    return text.replace("$", "$$")


def quote_json(value: object) -> str:
    """A scalar or list of YAML that means exactly this: JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)
