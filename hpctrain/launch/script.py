"""The rank's side of `hpctrain run`: join MPI, export the usual variables, run the script."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.freed_memory import launch_variables
from hpctrain.launch import relay, tee
from hpctrain.launch.program import Program, run_command
from hpctrain.world import (
    AgreedExit,
    Launch,
    Place,
    end_all_ranks,
    exit_code_of,
    install_hook,
    load_mpi,
    read_affinity,
    read_core_map,
    report_exit,
    report_hard_exits,
    roll_call,
    share_of_cores,
    split_communicators,
    write_whole_lines,
)

__all__ = ["make_log_dir", "run_here", "tee_output"]


def run_here(
    program: Program, launch: Launch, environ: Mapping[str, str], *, log_dir: Path | None
) -> int:
    """Collective: run the program on this rank of a job that a launcher has started.

    Args:
        program: The same on every rank.
        launch: How this process was started.
        environ: The environment, for the address of the relay.
        log_dir: Where each rank's output is kept as well.

    Returns:
        The exit code of this rank, when it ended without an error.
    """
    if "torch" not in sys.modules:  # it reads them when it is loaded
        for name, value in launch_variables(environ).items():
            os.environ.setdefault(name, value)
    started_by_us = relay.VARIABLE in environ
    launch = relay.attach(launch, environ)
    if log_dir is not None:
        tee_output(log_dir, launch.rank)
    if program.is_command:
        program.check()
        return run_command(program, launch, os.environ, started_by_us=started_by_us)
    if launch.size != 1:
        write_whole_lines()
    install_hook(launch)
    report_hard_exits(launch)
    try:
        program.check()
        MPI = load_mpi(launch, script=program.target)
        roll_call(MPI.COMM_WORLD, "hpctrain run", timeout_s=300.0)
        _export(*_rendezvous(MPI.COMM_WORLD, launch))
        program.run()
    except AgreedExit as error:  # each rank has said so when it left its world
        return exit_code_of(error)
    except BaseException as error:  # whatever it is, no rank may be left waiting
        if exit_code_of(error) != 0:
            end_all_ranks(launch, error)
    report_exit(launch, 0, "finished")
    return 0


def _rendezvous(comm: object, launch: Launch) -> tuple[Place, str, int, int]:
    """Collective: where this rank is, and rank 0's address and a port that was free there just now.

    The last is how many cores are this rank's share of its node.
    """
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm must be an MPI communicator, not {type(comm).__name__}")
    comms, place = split_communicators(comm)
    offer = None
    if place.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            host = launch.network_name(socket.gethostname())
            offer = ("127.0.0.1" if place.num_nodes == 1 else host, probe.getsockname()[1])
    address, port = comms.comm.bcast(offer, root=0)
    masks = comms.node.allgather(read_affinity())
    share = share_of_cores(masks, place.local_rank, read_core_map().core_of)
    comms.free()
    return place, address, port, share


def _export(place: Place, address: str, port: int, num_threads: int) -> None:
    """Set what `torch.distributed`'s env:// and most scripts look for, and threads.

    Libraries with their own threads (Arm's, OpenBLAS) count all cores when they are loaded,
    regardless of later torch settings: ranks would then compete for cores.
    """
    if place.size > 1 and not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_size),
        GROUP_RANK=str(place.node_rank),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )


def make_log_dir(folder: Path) -> None:
    """Make the folder of the log files, or say why that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--log-dir {folder} cannot be written to ({error}); name a folder that can"
        ) from error


def tee_output(folder: Path, rank: int, *, append: bool = False) -> None:
    """Copy this rank's output to a file, by a process of its own that outlives a killed rank."""
    make_log_dir(folder)
    path = folder / f"rank-{rank:05d}.log"
    if not append:
        path.write_bytes(b"")
    out, err = os.pipe(), os.pipe()
    subprocess.Popen(
        [sys.executable, "-I", "-S", tee.__file__, str(path), str(out[0]), str(err[0])],
        stdin=subprocess.DEVNULL,
        pass_fds=(out[0], err[0]),
        start_new_session=True,
    )
    for (reader, writer), descriptor in ((out, 1), (err, 2)):
        os.dup2(writer, descriptor)
        os.close(reader)
        os.close(writer)
