"""Loads MPI through mpi4py, once, with the threads that Horovod and prefetching need."""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING

from hpctrain import log
from hpctrain.batch_systems import ask_plugins, ask_program
from hpctrain.errors import LaunchError
from hpctrain.mpi_version import identify
from hpctrain.world.launcher import Launch
from hpctrain.world.mismatch import explain_mismatch, foresee_trouble
from hpctrain.world.watching import DEFAULT_S

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["load_mpi"]

_ASK_S = 10.0


def load_mpi(launch: Launch, *, script: str, timeout_s: float = DEFAULT_S) -> ModuleType:
    """Collective: start MPI and check it against the launcher; called by every rank.

    Args:
        launch: What the launcher says.
        script: The user's script, for messages.
        timeout_s: How long MPI may take to start: it waits for all ranks.

    Returns:
        The module `mpi4py.MPI`, initialised.

    Raises:
        LaunchError: there is no MPI, or it disagrees with the launcher.
    """
    if launch.row is not None and not launch.row.starts_mpi:
        raise LaunchError(
            f"{launch.title} started {launch.size} processes without MPI, and hpctrain gets its "
            f"ranks from MPI; start the same script with `hpctrain run -n {launch.size} {script}` "
            f"or `mpirun -n {launch.size} python {script}`"
        )
    try:
        import mpi4py

        already_set = mpi4py.rc.initialize
        mpi4py.rc.initialize = False
        from mpi4py import MPI

        mpi4py.rc.initialize = already_set
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py cannot load an MPI library ({error}); load the site's MPI module or "
            "`pip install mpich`, then try again (`hpctrain doctor` shows what it sees)"
        ) from error
    library = identify(MPI.Get_library_version())
    if not MPI.Is_initialized():
        advice = foresee_trouble(launch, library)
        if advice and launch.rank == 0:
            log.warn(advice)
        # MPI_Init waits for all ranks and holds Python's lock: only a timer without Python ends it.
        faulthandler.dump_traceback_later(max(timeout_s, 1.0), exit=True, file=2)
        try:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        finally:
            faulthandler.cancel_dump_traceback_later()
        _finalize_at_exit()
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if explain_mismatch(launch, rank=rank, size=size, mpi=library, script=script):
        offered = (
            ask_plugins(ask_program) if launch.row is not None and launch.row.name == "srun" else ()
        )
        raise LaunchError(
            explain_mismatch(
                launch, rank=rank, size=size, mpi=library, script=script, offered=offered
            )
        )
    return MPI


def _finalize_at_exit() -> None:
    """Finalize MPI when Python ends, as mpi4py does when it starts MPI itself."""
    import atexit

    from mpi4py import MPI

    def finalize() -> None:
        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()

    atexit.register(finalize)
