"""Horovod starts once in a process, over one set of ranks, with one set of options."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hpctrain.engines.horovod_options import HorovodOptions, to_environment
from hpctrain.errors import ConfigError
from hpctrain.world import agree

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["Running", "start"]


@dataclass
class Running:
    """The Horovod of this process."""

    hvd: Any
    """The module `horovod.torch`."""
    comm: Comm
    options: HorovodOptions
    dynamic: bool
    """Whether process sets can be added: not when someone else started it without."""
    sets: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """Process sets by their ranks; Horovod refuses a second one over the same ranks."""
    num_engines: int = 0


_running: Running | None = None


def start(comm: Comm, options: HorovodOptions, *, timeout_s: float) -> Running:
    """Collective: start Horovod over these ranks, or take the one that runs if it fits.

    Raises:
        ConfigError: on all ranks; it runs over other ranks, or with other options.
    """
    global _running  # a process has one Horovod, so this is where the process keeps it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own imports warn of what setuptools will drop
        import horovod.torch as hvd
    agree(comm, _why_not(hvd, comm, options), error=ConfigError, timeout_s=timeout_s)
    if _running is None:
        dynamic = not hvd.is_initialized()
        kept = comm.Dup()  # Horovod keeps the object, so nobody may free it
        if dynamic:
            variables = {**to_environment(options), "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
            with _environment(variables):
                hvd.init(comm=kept)
        _running = Running(hvd=hvd, comm=kept, options=options, dynamic=dynamic)
        everyone = tuple(range(comm.Get_size()))
        _running.sets[everyone] = hvd.global_process_set
    return _running


def _why_not(hvd: Any, comm: Comm, options: HorovodOptions) -> str | None:
    """Why the Horovod of this process cannot serve these ranks and options, or None."""
    if _running is not None:
        if MPI.Comm.Compare(_running.comm, comm) not in (MPI.IDENT, MPI.CONGRUENT):
            return (
                f"Horovod already runs over {_running.comm.Get_size()} ranks in this process and "
                f"cannot start again over {comm.Get_size()} others; make the engine over the whole "
                "world and use split(), or take the mpi or torch engine for the second world"
            )
        if options not in (_running.options, HorovodOptions()):
            return (
                f"Horovod already runs with {_changed(_running.options)} and cannot change to "
                f"{_changed(options)}; give the options to the first engine of the process"
            )
        return None
    if not hvd.is_initialized():
        return None
    if (hvd.rank(), hvd.size()) != (comm.Get_rank(), comm.Get_size()):
        return (
            f"Horovod was started elsewhere as rank {hvd.rank()} of {hvd.size()}, but here this is "
            f"rank {comm.Get_rank()} of {comm.Get_size()}; do not call hvd.init() yourself"
        )
    if options != HorovodOptions():
        return "Horovod was started elsewhere, so options come too late; do not call hvd.init()"
    return None


def _changed(options: HorovodOptions) -> str:
    return str(to_environment(options)) if options != HorovodOptions() else "default options"


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for as long as Horovod reads them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
