"""The rank's side of `hpctrain run`: join MPI, export the usual variables, run the script."""

from __future__ import annotations

import importlib.util
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import ConfigError, LaunchError
from hpctrain.freed_memory import launch_variables
from hpctrain.launch import relay, tee
from hpctrain.world import Launch, cores, roll_call
from hpctrain.world.guard import (
    AgreedExit,
    end_all_ranks,
    exit_code_of,
    install_hook,
    report_exit,
    report_hard_exits,
)
from hpctrain.world.library import load_mpi
from hpctrain.world.output import write_whole_lines
from hpctrain.world.topology import Place, split

__all__ = ["Program", "make_log_dir", "run_here", "tee_output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What to run: a script or a module, with its arguments."""

    target: str
    is_module: bool
    arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse a script or module that is not there, before anything is started."""
        if self.is_module:
            top = self.target.partition(".")[0]
            if not _is_known(top, Path.cwd()):
                raise ConfigError(_no_module(self.target, top))
        elif not Path(self.target).is_file():
            raise ConfigError(
                f"script {self.target!r} is not a file here ({Path.cwd()}); give a path to a "
                "Python file, or -m MODULE"
            )

    def words(self) -> list[str]:
        """The words after `hpctrain run` that mean this program."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    def run(self) -> None:
        """Run it as `__main__`, as Python itself would."""
        sys.argv[:] = [self.target, *self.arguments]
        if self.is_module:
            sys.path.insert(0, os.getcwd())
            self._find()
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(self.target).resolve().parent))
            runpy.run_path(self.target, run_name="__main__")

    def _find(self) -> None:
        """Refuse a module that is not there; its packages are imported on the way, as by Python.

        Raises:
            LaunchError: there is none of that name, or it is a package that cannot be run.
        """
        try:
            spec = importlib.util.find_spec(self.target)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing != self.target and not self.target.startswith(f"{missing}."):
                raise  # the user's own package imports something that is not there
            raise LaunchError(_no_module(self.target, missing)) from None
        if spec is None:
            raise LaunchError(_no_module(self.target, self.target))
        if spec.submodule_search_locations is not None and not importlib.util.find_spec(
            f"{self.target}.__main__"
        ):
            raise LaunchError(
                f"-m {self.target} is a package without a __main__ module, so there is nothing to "
                "run; name a module in it"
            )


def _is_known(name: str, folder: Path) -> bool:
    """Whether there is a module of that name, here or in the environment; imports nothing."""
    here = (folder / name).is_dir() or (folder / f"{name}.py").is_file()
    try:
        return here or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _no_module(target: str, missing: str) -> str:
    return (
        f"-m {target}: there is no module {missing!r} here ({Path.cwd()}) or in this Python's "
        "environment; correct the name, install it, or start in the folder that has it"
    )


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
    launch = relay.attach(launch, environ)
    if log_dir is not None:
        tee_output(log_dir, launch.rank)
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
    rooms, place = split(comm)
    offer = None
    if place.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            host = launch.network_name(socket.gethostname())
            offer = ("127.0.0.1" if place.num_nodes == 1 else host, probe.getsockname()[1])
    address, port = rooms.comm.bcast(offer, root=0)
    masks = rooms.node.allgather(cores.read_affinity())
    share = cores.share_of_cores(masks, place.local_rank, cores.read_core_map().core_of)
    rooms.free()
    return place, address, port, share


def _export(place: Place, address: str, port: int, num_threads: int) -> None:
    """Set what `torch.distributed`'s env:// and most scripts look for, and threads.

    Libraries that compute with threads of their own (Arm's, OpenBLAS) count all cores when they are
    loaded, whatever torch is told later: ranks would then take the cores from each other.
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
