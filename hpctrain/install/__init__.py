"""Floor 1: setting up: which MPI is here, Horovod built for exactly this torch and MPI, the venv.

Standard library only, so that all of it works before anything is installed. `mpi` finds the MPI and
its launcher, `horovod` builds and checks Horovod, `setup` makes the environment of a checkout.
Names are loaded on first use: `bootstrap` runs under whatever Python there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.install.horovod.build import BuildOptions, build_wheel
    from hpctrain.install.horovod.cache import cache_home
    from hpctrain.install.horovod.check import HorovodCheck, check_horovod
    from hpctrain.install.horovod.deploy import install_wheel
    from hpctrain.install.horovod.facts import collect
    from hpctrain.install.lock import held
    from hpctrain.install.mpi import (
        LoadedMpi,
        launchers_on,
        loaded_mpi,
        matching_mpirun,
        probe_mpi4py,
    )

__all__ = [
    "BuildOptions",
    "HorovodCheck",
    "LoadedMpi",
    "build_wheel",
    "cache_home",
    "check_horovod",
    "collect",
    "held",
    "install_wheel",
    "launchers_on",
    "loaded_mpi",
    "matching_mpirun",
    "probe_mpi4py",
]

__getattr__ = lazy(
    __name__,
    {
        ".horovod.build": ("BuildOptions", "build_wheel"),
        ".horovod.cache": ("cache_home",),
        ".horovod.check": ("HorovodCheck", "check_horovod"),
        ".horovod.deploy": ("install_wheel",),
        ".horovod.facts": ("collect",),
        ".lock": ("held",),
        ".mpi": ("LoadedMpi", "launchers_on", "loaded_mpi", "matching_mpirun", "probe_mpi4py"),
    },
)
