"""The batch systems there are: those of this package, then those of plug-ins.

A plug-in is a Python package with an entry point in the group `hpctrain.batch_systems` whose value
is a `BatchSystem`. Plug-ins are loaded only where no system of this package fits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from hpctrain.batch_systems.flux import Flux
from hpctrain.batch_systems.grid_engine import GridEngine
from hpctrain.batch_systems.job import Template
from hpctrain.batch_systems.kubernetes import Kubernetes
from hpctrain.batch_systems.launchers import MPI_LAUNCHERS, LauncherRow
from hpctrain.batch_systems.lsf import Lsf
from hpctrain.batch_systems.pbs import Pbs
from hpctrain.batch_systems.slurm import Slurm
from hpctrain.batch_systems.system import BatchSystem
from hpctrain.errors import ConfigError
from hpctrain.plugins import find_plugins, load_plugin

__all__ = [
    "GROUP",
    "all_systems",
    "detect_launcher",
    "detect_system",
    "find_system",
    "find_system_titled",
    "find_template",
    "known_launchers",
    "templates",
]

GROUP = "hpctrain.batch_systems"

_OWN: tuple[BatchSystem, ...] = (  # in the order in which a job's variables are looked for
    Slurm(),
    Pbs(),
    Lsf(),
    Flux(),
    GridEngine(),
    Kubernetes(),
)


@functools.cache
def _plugins() -> tuple[BatchSystem, ...]:
    found: list[BatchSystem] = []
    for point in find_plugins(GROUP).values():
        system = load_plugin(point, f"the batch system {point.name}")
        if not isinstance(system, BatchSystem):
            raise ConfigError(
                f"the batch system {point.name} ({point.value}) is a {type(system).__name__}; the "
                "entry point must name an instance of hpctrain.batch_systems.BatchSystem"
            )
        if system.name in {each.name for each in (*_OWN, *found)}:
            raise ConfigError(
                f"the batch system {point.name} ({point.value}) uses the name {system.name!r}, "
                "which is taken; rename it or uninstall its package"
            )
        found.append(system)
    return tuple(found)


def _each() -> Iterator[BatchSystem]:
    """All systems; plug-ins are loaded only after the others were tried."""
    yield from _OWN
    yield from _plugins()


def all_systems() -> tuple[BatchSystem, ...]:
    """All batch systems, plug-ins last."""
    return tuple(_each())


def find_system(name: str) -> BatchSystem:
    """Look up a batch system by its name, as in a site's template.

    Raises:
        ConfigError: there is none of that name.
    """
    for system in _each():
        if system.name == name:
            return system
    known = ", ".join(system.name for system in all_systems())
    raise ConfigError(f"no batch system {name!r}; there are {known}")


def find_system_titled(title: str | None) -> BatchSystem | None:
    """Look up a batch system by its title, as in `Launch.batch_system`."""
    return next((each for each in _each() if each.title == title), None) if title else None


def detect_system(environ: Mapping[str, str]) -> BatchSystem | None:
    """The batch system in whose job a process runs, by its environment."""
    for system in _each():
        if system.job_variables and all(name in environ for name in system.job_variables):
            return system
    return None


def known_launchers() -> Iterator[LauncherRow]:
    """All launchers, those that start processes inside others first.

    `mpirun` inside `sbatch` leaks the variables of its own step into every rank, where several
    ranks all see SLURM_PROCID=0; so MPI's launchers come before those of batch systems, Flux, which
    runs inside other systems' jobs, before them, and Slurm's last.
    """
    yield from MPI_LAUNCHERS
    yield from (each.launcher for each in reversed(_OWN) if each.launcher is not None)
    yield from (each.launcher for each in _plugins() if each.launcher is not None)


def detect_launcher(environ: Mapping[str, str]) -> LauncherRow | None:
    """The launcher that started a process, by its environment."""
    for row in known_launchers():
        if all(name in environ for name in row.present):
            return row
    return None


def templates() -> dict[str, Template]:
    """All templates by name."""
    return {template.name: template for each in _each() for template in each.templates}


def find_template(name: str) -> Template:
    """Look a template up by name.

    Raises:
        ConfigError: there is none of that name.
    """
    for system in _each():
        for template in system.templates:
            if template.name == name:
                return template
    raise ConfigError(f"no template {name!r}; there are {', '.join(templates())}")
