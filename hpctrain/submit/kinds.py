"""The templates there are: which batch system each is for, and which launcher it starts."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import ConfigError

__all__ = ["MANIFESTS", "TEMPLATES", "Template", "find_template"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """One file of `jobs/templates`."""

    batch: str
    launcher: str
    mpis: tuple[str, ...]
    """What `mpi` may be with this launcher; () where the launcher has only one way."""
    needs_image: bool = False


_SRUN = ("pmix", "pmi2", "cray_shasta", "pspmix", "none")

TEMPLATES = {
    "slurm-srun": Template(batch="slurm", launcher="srun", mpis=_SRUN),
    "slurm-mpirun": Template(batch="slurm", launcher="mpirun", mpis=("openmpi", "mpich")),
    "slurm-apptainer": Template(batch="slurm", launcher="srun", mpis=_SRUN, needs_image=True),
    "slurm-edf": Template(batch="slurm", launcher="srun", mpis=_SRUN, needs_image=True),
    "pbs-mpiexec": Template(batch="pbs", launcher="mpiexec", mpis=("pals", "mpich", "openmpi")),
    "lsf-jsrun": Template(batch="lsf", launcher="jsrun", mpis=()),
    "flux-run": Template(batch="flux", launcher="flux", mpis=()),
}
MANIFESTS = {
    "k8s-mpijob": Template(
        batch="kubernetes", launcher="mpirun", mpis=("openmpi", "mpich"), needs_image=True
    ),
}
"""Templates that make no script: most options have no meaning for them."""


def find_template(name: str) -> Template:
    """Look a template up by name.

    Raises:
        ConfigError: there is none of that name.
    """
    known = TEMPLATES | MANIFESTS
    if name not in known:
        raise ConfigError(f"no template {name!r}; there are {', '.join(known)}")
    return known[name]
