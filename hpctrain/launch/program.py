"""What each rank runs: a script or a module of this Python, or another command.

A script or a module runs inside the rank's own process, which joins MPI before it. Any other
command is a child of that process, joins MPI itself if it likes, and finds the usual variables.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain import log
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.relay import CONTROL_VARIABLE
from hpctrain.world import Launch, read_affinity, read_core_map, report_exit, share_of_cores

__all__ = [
    "Program",
    "is_another_python",
    "is_this_python",
    "meeting_point",
    "own_variables",
    "read_program",
    "run_command",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What to run: a script, a module or any command, with its arguments."""

    target: str
    is_module: bool
    is_command: bool = False
    arguments: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse a script or module that is not there, before anything is started."""
        if self.is_module:
            top = self.target.partition(".")[0]
            if not _is_known(top, Path.cwd()):
                raise ConfigError(_no_module(self.target, top))
        elif self.is_command:
            if not Path(self.target).is_file() and shutil.which(self.target) is None:
                raise ConfigError(f"command {self.target!r} is not found on PATH; give its path")
        elif not Path(self.target).is_file():
            raise ConfigError(
                f"{self.target!r} is neither a file here ({Path.cwd()}) nor a command on PATH; "
                "give the path of a Python file, -m MODULE, or a command"
            )

    def words(self) -> list[str]:
        """The words after `hpctrain run` that mean this program."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    def run(self) -> None:
        """Run it as `__main__`, as Python itself would."""
        sys.argv[:] = [self.target, *self.arguments]
        if self.is_module:
            if not sys.flags.safe_path:  # as Python does it itself
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
        "environment; correct the name, install it, or start in its folder"
    )


_INTERPRETER = re.compile(r"python(3(\.\d+)?t?)?")
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


def read_program(words: Sequence[str], *, is_module: bool) -> Program:
    """Find out what to run: a script, `-m MODULE`, `python SCRIPT`, or any command, as mpirun does.

    Raises:
        ConfigError: nothing was given.
    """
    words = list(words)
    if words[:1] == ["--"]:
        del words[0]
    if not is_module and words and is_this_python(words[0]):
        named = words[1:2] if words[1:2] != ["-m"] else words[2:3]
        if named and not named[0].startswith("-"):  # options of Python's own need a Python
            words = words[1:]
    if not is_module and words[:1] == ["-m"]:
        is_module, words = True, words[1:]
    if not words:
        raise ConfigError("no script was given; write `hpctrain run [-n N] SCRIPT [ARGS ...]`")
    return Program(
        target=words[0],
        is_module=is_module,
        is_command=not is_module and _is_command(words[0]),
        arguments=tuple(words[1:]),
    )


def is_this_python(word: str) -> bool:
    """Whether a word is a name of the Python that runs here, with its environment."""
    found, ours = shutil.which(word), Path(sys.executable)
    if not _INTERPRETER.fullmatch(Path(word).name) or found is None:
        return False
    same_folder = Path(found).absolute().parent.resolve() == ours.parent.resolve()
    return same_folder and Path(found).resolve() == ours.resolve()


def is_another_python(word: str) -> bool:
    """Whether a word names a Python that is not the one that runs here."""
    return _INTERPRETER.fullmatch(Path(word).name) is not None and not is_this_python(word)


def _is_command(word: str) -> bool:
    path = Path(word)
    if path.is_file():
        return os.access(path, os.X_OK) and not _is_python_file(path)
    return shutil.which(word) is not None


def _is_python_file(path: Path) -> bool:
    if path.suffix in (".py", ".pyw"):
        return True
    try:
        with path.open("rb") as file:
            first = file.readline(256)
    except OSError:  # it may be run all the same
        return False
    return first.startswith(b"#!") and b"python" in first


def own_variables(launch: Launch, num_cores: int | None) -> dict[str, str]:
    """What a command finds in its environment of what the launcher told this rank. Pure.

    Args:
        launch: How this rank was started.
        num_cores: The rank's share of the node's cores, for its threads; None leaves them alone.
    """
    found = {"RANK": launch.rank, "WORLD_SIZE": launch.size}
    if launch.local_rank is not None:
        found["LOCAL_RANK"] = launch.local_rank
    if launch.local_size is not None:
        found["LOCAL_WORLD_SIZE"] = launch.local_size
    if num_cores is not None and launch.size > 1 and launch.num_threads is None:
        found["OMP_NUM_THREADS"] = num_cores
    return {name: str(value) for name, value in found.items()}


def meeting_point(first_host: str | None) -> dict[str, str]:
    """Where the ranks of a command may meet: rank 0's host, and a port that is free here now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return {"MASTER_ADDR": first_host or "127.0.0.1", "MASTER_PORT": str(port)}


def run_command(
    program: Program, launch: Launch, environ: Mapping[str, str], *, started_by_us: bool
) -> int:
    """Run a command as this rank's child until it ends; signals are passed on to it.

    Returns:
        Its exit code, 128 more than the signal that ended it.
    """
    share = None
    if started_by_us and launch.local_size is not None:  # our mpirun binds no rank to cores
        masks = [read_affinity()] * launch.local_size
        share = share_of_cores(masks, launch.local_rank or 0, read_core_map().core_of)
    child = {k: v for k, v in environ.items() if k != CONTROL_VARIABLE}
    command = [program.target, *program.arguments]
    path = Path(program.target)
    executable = str(path.absolute()) if path.is_file() else None  # mpirun asks for ./ here
    process = subprocess.Popen(
        command,
        executable=executable,
        env={**child, **own_variables(launch, share)},
        close_fds=False,  # MPICH's process manager is reached by a descriptor
        preexec_fn=_die_with_parent(),
    )
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    how = f"ended with exit code {code}"
    if code < 0:
        how, code = f"was killed by {signal.Signals(-code).name}", 128 - code
    if code != 0:
        where = f"rank {launch.rank} of {launch.size} on {socket.gethostname()}"
        log.notice(f"{where}: {program.target} {how}; ending all ranks")
    report_exit(launch, code, f"{program.target} {how}")
    return code


def _die_with_parent() -> Callable[[], None]:
    """For the child, before it becomes the command: killing the rank kills the command."""
    libc = ctypes.CDLL(None)

    def ask_for_it() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask_for_it
