"""Making a venv, also where Debian left parts of it out, and mending one left half made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain import log
from hpctrain.errors import InstallError
from hpctrain.install.setup.steps import Steps

__all__ = ["LOCK_NAME", "ensure_venv", "is_healthy", "may_clear", "repair_packages", "ways_to_make"]

MARKER_NAME = ".hpctrain-venv"
LOCK_NAME = ".hpctrain-lock"
LOG_NAME = "hpctrain-setup.log"
_KEPT = {MARKER_NAME, LOCK_NAME, LOG_NAME}


def may_clear(folder: Path) -> bool:
    """Whether the folder is a venv, made by us, or empty; anything else is not ours to clear."""
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    names = {child.name for child in folder.iterdir()}
    return not names - _KEPT or "pyvenv.cfg" in names or MARKER_NAME in names


def is_healthy(venv: Path, environ: Mapping[str, str]) -> bool:
    """Whether the venv's interpreter runs, is of this Python's version, and has pip."""
    code = "import pip, sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run(
            [str(venv / "bin" / "python"), "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    wanted = f"{sys.version_info.major} {sys.version_info.minor}"
    return done.returncode == 0 and done.stdout.strip() == wanted


def ways_to_make(
    venv: Path, *, python: str, has_ensurepip: bool, has_pip: bool, uv: str | None, has_tool: bool
) -> list[list[list[str]]]:
    """Pure: the ways to make a venv here, best first; each is a list of commands.

    Args:
        venv: Where.
        python: The interpreter to make it from.
        has_ensurepip: Whether `venv` can bring pip (Debian splits that off).
        has_pip: Whether `python` itself has a pip that can install into another interpreter.
        uv: Path of uv, if there is one.
        has_tool: Whether `python` has virtualenv.
    """
    ways = []
    if has_ensurepip:
        ways.append([[python, "-m", "venv", str(venv)]])
    if has_tool:
        ways.append([[python, "-m", "virtualenv", "-p", python, str(venv)]])
    if uv:
        ways.append([[uv, "venv", "--seed", "--allow-existing", "-p", python, str(venv)]])
    if has_pip:
        inside = str(venv / "bin" / "python")
        bare = [python, "-m", "venv", "--without-pip", str(venv)]
        ways.append([bare, [python, "-m", "pip", "--python", inside, "install", "pip"]])
    return ways


def ensure_venv(venv: Path, steps: Steps) -> None:
    """Create the venv, or recreate it if it is broken or for another Python.

    Raises:
        InstallError: it cannot be made; the cure is named.
    """
    if is_healthy(venv, steps.environ):
        return
    leftovers = [child for child in venv.iterdir() if child.name not in _KEPT]
    if leftovers:
        log.notice(f"{venv} is broken, incomplete or for another Python; recreating it")
    python = getattr(sys, "_base_executable", "") or sys.executable
    ways = ways_to_make(
        venv,
        python=python,
        has_ensurepip=_has(python, "ensurepip", steps.environ),
        has_pip=_has(python, "pip", steps.environ),
        uv=shutil.which("uv", path=steps.environ.get("PATH")),
        has_tool=_has(python, "virtualenv", steps.environ),
    )
    for way in ways:
        _clear(venv)
        made = all(steps.attempt(f"making {venv}", command, limit_s=300) for command in way)
        if made and is_healthy(venv, steps.environ):
            return
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    tried = f" {steps.tail()}" if ways else ""
    raise InstallError(
        f"no virtual environment can be made with {python}: no working ensurepip, virtualenv or "
        "pip, and no uv. Install one of them (Debian and Ubuntu: `apt "
        f"install python{version}-venv`), or name another Python: make PYTHON=...{tried}"
    )


def repair_packages(venv: Path) -> list[str]:
    """Drop what an interrupted pip left, so that pip installs it again; the names dropped.

    pip writes INSTALLER after a package's files: metadata without it belongs to half a package,
    which pip would otherwise take for a whole one. Names that begin with ~ are being replaced.
    """
    dropped = []
    for folder in venv.glob("lib/python3.*/site-packages/*"):
        half = folder.name.endswith(".dist-info") and not (folder / "INSTALLER").is_file()
        if half or folder.name.startswith("~"):
            shutil.rmtree(folder, ignore_errors=True)
            dropped.append(folder.name)
    return sorted(dropped)


def _has(python: str, module: str, environ: Mapping[str, str]) -> bool:
    # Debian's ensurepip is there and refuses; its bundled wheels are what is missing.
    code = f"import {module}"
    if module == "ensurepip":
        code += "; ensurepip.version()"
    try:
        command = [python, "-c", code]
        done = subprocess.run(command, capture_output=True, timeout=60, env=dict(environ))
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _clear(venv: Path) -> None:
    for child in venv.iterdir():
        if child.name in _KEPT:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
