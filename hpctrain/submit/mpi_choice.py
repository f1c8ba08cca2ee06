"""Which `srun --mpi=` starts the ranks, where neither the user nor the site says it.

srun starts ranks of an MPI that it does not match as separate jobs of one rank, or they fail at
once; so both the installed MPI and srun are queried.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.batch_systems import Ask, ask_plugins, ask_program, find_template
from hpctrain.errors import ConfigError
from hpctrain.install import LoadedMpi, probe_mpi4py
from hpctrain.mpi_version import choose_plugin
from hpctrain.submit.request import Request
from hpctrain.submit.site import Site

__all__ = ["choose_srun_mpi"]

_UNSURE = "; MPICH needs --mpi pmi2, and `srun --mpi=list` on the cluster lists its plugins"


def choose_srun_mpi(
    request: Request,
    site: Site,
    *,
    say: Callable[[str], None],
    ask: Ask = ask_program,
    probe: Callable[[Path], LoadedMpi | None] = probe_mpi4py,
) -> Request:
    """Choose the MPI for srun, where neither the request nor the site does.

    Args:
        request: The job.
        site: Where it goes.
        say: Is called with what was chosen, and why.
        ask: Runs srun.
        probe: Finds which MPI an interpreter loads.

    Raises:
        ConfigError: srun cannot start the MPI that is installed.
    """
    template = find_template(request.template or site.template)
    if template.launcher != "srun" or request.mpi is not None or site.mpi in template.mpis:
        return request
    default = template.mpis[0]
    if request.image is not None:
        say(f"srun gets --mpi={default}: the MPI in {request.image} is unknown here{_UNSURE}")
        return request
    offered = ask_plugins(ask)
    if not offered:
        say(f"srun gets --mpi={default}: srun cannot be queried here{_UNSURE}")
        return request
    python = Path(request.venv) / "bin" / "python" if request.venv else Path(sys.executable)
    loaded = probe(python)
    if loaded is None:
        say(f"srun gets --mpi={default}: mpi4py of {python} loads no MPI here{_UNSURE}")
        return request
    chosen = choose_plugin(loaded.mpi, offered)
    known = next((name for name in template.mpis if chosen and chosen.startswith(name)), None)
    if known is None:
        raise ConfigError(
            f"srun offers --mpi={', '.join(sorted(offered))}, none of which starts {loaded.mpi} "
            f"of {python}; use --template slurm-mpirun, or give --mpi if the ranks load another"
        )
    say(f"srun gets --mpi={known}, for {loaded.mpi} of {python}")
    return dataclasses.replace(request, mpi=known)
