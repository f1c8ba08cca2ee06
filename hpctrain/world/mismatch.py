"""Does MPI agree with the launcher? If not: the cause and the exact cure. Pure.

The commonest way to lose a day on a cluster is a job of four ranks that runs as four jobs of one:
each trains alone, all write the same files, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Collection

from hpctrain.mpi_version import MpiVersion, choose_plugin
from hpctrain.world.launcher import Launch

__all__ = ["advise_srun", "explain_mismatch", "foresee_trouble"]

_MPIRUN_OF = {"openmpi": "openmpi", "hydra": "mpich", "mvapich": "mvapich"}


def _is_foreign(launch: Launch, family: str) -> bool:
    """Whether the launcher is an mpirun of another MPI than the one that is loaded."""
    owner = _MPIRUN_OF.get(launch.row.name) if launch.row else None
    if owner is None or family == "unknown":
        return False
    ours, theirs = (MpiVersion(family=name, version="") for name in (family, owner))
    return not theirs.starts(ours)


def explain_mismatch(
    launch: Launch,
    *,
    rank: int,
    size: int,
    mpi: MpiVersion,
    script: str,
    offered: Collection[str] = (),
) -> str | None:
    """Compare MPI's rank and size with the launcher's; None when they agree.

    Args:
        launch: What the environment says.
        rank: Rank in MPI_COMM_WORLD.
        size: Size of MPI_COMM_WORLD.
        mpi: The loaded library.
        script: The user's script, for the command in the cure.
        offered: What `srun --mpi=list` prints; empty if it was not queried.
    """
    if launch.row is None or (launch.rank == rank and launch.size == size):
        return None
    seen = (
        f"{launch.title} started {launch.size} ranks, this one as rank {launch.rank}, but "
        f"{mpi} sees rank {rank} of {size}"
    )
    if launch.size == size:
        return (
            f"{seen}; the ranks are numbered differently, so per-rank variables of the launcher "
            "cannot be trusted. Unset leftover variables of another launcher, or start the job "
            f"with `hpctrain run -n {launch.size} {script}`"
        )
    lonely = f"; these would train as {launch.size} separate jobs. " if size == 1 else ". "
    return seen + lonely + _cure(launch, mpi, script, offered)


def _cure(launch: Launch, mpi: MpiVersion, script: str, offered: Collection[str]) -> str:
    row = launch.row
    if row is None:
        return ""
    again = f"`hpctrain run -n {launch.size} {script}`"
    if row.name == "srun":
        given = f"srun offered {launch.pmi or 'no process manager'} and this MPI needs another"
        return f"{given}: {advise_srun(mpi, offered)}"
    if _is_foreign(launch, mpi.family):
        return (
            "That launcher belongs to a different MPI than the one mpi4py loads: start the job "
            "with "
            f"{again}, which finds the matching mpirun, or make mpi4py load the launcher's MPI "
            "(MPI4PY_MPIABI; `pip uninstall mpich` when the wheel shadows the site's)"
        )
    return (
        "The launcher's variables may be left over from an outer job, or its process manager does "
        f"not reach this MPI: start the job with {again}, and see `hpctrain doctor`"
    )


def advise_srun(mpi: MpiVersion, offered: Collection[str]) -> str:
    """What to write after srun for this MPI, where the site's srun has it.

    Args:
        mpi: The loaded library.
        offered: What `srun --mpi=list` prints; empty if it was not queried.
    """
    plugin = choose_plugin(mpi, offered)
    if plugin is not None:
        return f"use `srun --mpi={plugin} ...`, which this Slurm and {mpi} both have"
    usual = " or ".join(f"`srun --mpi={name} ...`" for name in mpi.srun_plugins or ("pmix",))
    if offered:
        return (
            f"{mpi} needs {usual}, and this Slurm has only {', '.join(sorted(offered))}; start the "
            "ranks with `hpctrain run` inside sbatch, or let mpi4py load an MPI that fits"
        )
    return (
        f"use {usual} (`srun --mpi=list` shows what the site has), or let mpi4py load the MPI that "
        "the site's srun supports"
    )


def foresee_trouble(launch: Launch, mpi: MpiVersion) -> str | None:
    """Name a launcher and MPI that are likely to die inside MPI_Init, before it happens.

    MPI_Init kills the process itself when its process manager is missing, so the advice has to be
    on the screen before. It is advice and no refusal: sites patch their MPIs.
    """
    if launch.row is None:
        return None
    if _is_foreign(launch, mpi.family):
        return (
            f"{launch.title} belongs to a different MPI than the one mpi4py loads ({mpi}); if MPI "
            f"fails to start now, use `hpctrain run -n {launch.size} ...`, which finds the right "
            "mpirun"
        )
    if launch.row.name != "srun":
        return None
    if not mpi.srun_plugins or mpi.family == "cray" or launch.pmi in mpi.srun_plugins:
        return None
    return (
        f"srun offers {launch.pmi or 'no process manager'}, and {mpi} usually needs "
        f"{' or '.join(mpi.srun_plugins)}; if MPI fails to start now, use "
        f"`srun --mpi={mpi.srun_plugins[0]} ...` (`srun --mpi=list` shows what the site has)"
    )
