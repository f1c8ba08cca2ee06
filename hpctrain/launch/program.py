"""What to run: a script or a module of this Python, or a command."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import ConfigError, LaunchError

__all__ = ["Program"]


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
        "environment; correct the name, install it, or start in the folder that has it"
    )
