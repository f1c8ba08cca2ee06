"""A copy of the code at submission: the job runs what was submitted, not what was edited since.

The job's directory stays the one it was submitted from, so that data and results are where they
always are. What changes are the words of the command that name files of the copy, and where Python
looks for modules.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.submit.pack import outside_paths
from hpctrain.submit.request import Request

__all__ = ["Snapshot", "run_snapshot", "take_snapshot"]

_MOST_BYTES = 256 << 20
_MOST_FILES = 20_000
_LARGEST_UNTRACKED = 1 << 20
"""Larger files that are not under version control are data, not code."""
_GIT_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The code of a directory, copied."""

    directory: Path
    """What was copied, and where the job runs."""
    folder: Path
    """The copy."""
    files: frozenset[str]
    """What is in it, by the path below the directory."""
    title: str
    """For people: of which commit, with how many files."""


def take_snapshot(directory: Path, folder: Path) -> Snapshot:
    """Copy the code of a directory.

    In a git work tree: what git tracks, and small files that it does not ignore. Elsewhere: small
    files, without hidden folders and virtual environments.

    Args:
        directory: Where the job is submitted from.
        folder: Where the copy goes; logs and other copies next to it are not copied.

    Raises:
        ConfigError: there is too much, or it cannot be copied.
    """
    tracked, commit = _ask_git(directory)
    names = tracked | {
        name
        for name in (_untracked(directory) if commit else _walk(directory))
        if _size(directory / name) <= _LARGEST_UNTRACKED
    }
    found = sorted(
        name
        for name in names
        if (directory / name).is_file() and not _is_own(directory / name, directory, folder)
    )
    total = sum(_size(directory / name) for name in found)
    if not found or total > _MOST_BYTES or len(found) > _MOST_FILES:
        raise ConfigError(
            f"--snapshot would copy {len(found)} files of {total >> 20} MiB from {directory}; at "
            f"least 1, at most {_MOST_FILES} of {_MOST_BYTES >> 20} MiB: submit from the folder of "
            "the code, or name data in .gitignore"
        )
    try:
        for name in found:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(directory / name, folder / name)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"--snapshot cannot copy into {folder} ({error})") from error
    of = f"commit {commit}" if commit else "no git work tree"
    return Snapshot(
        directory=directory,
        folder=folder,
        files=frozenset(found),
        title=f"{folder}, {len(found)} files, {of}",
    )


def run_snapshot(
    request: Request,
    snapshot: Snapshot,
    environ: Mapping[str, str],
    *,
    prefix: Path = Path(sys.prefix),
) -> Request:
    """The request with a command that runs the copy.

    Args:
        request: As it was asked for.
        snapshot: The copy.
        environ: Of who submits: batch systems hand it to the job.
        prefix: The Python environment of the ranks, which may import from the directory.

    Raises:
        ConfigError: the command would run nothing of the copy.
    """
    commands = tuple(
        tuple(_moved(word, snapshot) for word in command) for command in request.commands
    )
    by_module = any("-m" in command for command in commands)
    configured = any(
        new != old and not new.endswith(".py")
        for command, before in zip(commands, request.commands, strict=True)
        for new, old in zip(command, before, strict=True)
    )
    editable = [
        path.parent if (path / "__init__.py").exists() else path
        for path in map(Path, outside_paths(Path(request.venv) if request.venv else prefix))
        if path.is_relative_to(snapshot.directory)
    ]
    if commands == request.commands and not by_module and not editable:
        raise ConfigError(
            f"--snapshot: no word of the command names a file in {snapshot.directory}, so that "
            "nothing of the copy would be run; name the script, as -- python train.py"
        )
    environment = dict(request.environment)
    given = environment.get("PYTHONPATH", environ.get("PYTHONPATH", ""))
    parts = [_moved_folder(part, snapshot) for part in given.split(os.pathsep)] if given else []
    parts += [_moved_folder(str(path), snapshot) for path in editable]
    if by_module or configured:  # else Python searches the script's folder first: the copy
        parts.insert(0, str(snapshot.folder))
        environment["PYTHONSAFEPATH"] = "1"  # the job's directory is no place for modules now
    if parts:
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(parts))
    return dataclasses.replace(
        request,
        commands=commands,
        environment=environment,
        source=tuple(_moved(path, snapshot) for path in request.source),
        snapshot=snapshot.title,
    )


def _moved(word: str, snapshot: Snapshot) -> str:
    """A word of the command; where it names a file of the copy (also as --key=file), that file."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    name = _below(value, snapshot)
    return f"{option}{equals}{snapshot.folder / name}" if name in snapshot.files else word


def _moved_folder(path: str, snapshot: Snapshot) -> str:
    name = _below(path or ".", snapshot)
    known = name == "." or any(each.startswith(f"{name}/") for each in snapshot.files)
    return str(snapshot.folder / name) if name is not None and known else path


def _below(path: str, snapshot: Snapshot) -> str | None:
    """A path as it is called below the directory; None outside of it."""
    if not path:
        return None
    relative = os.path.relpath(os.path.join(snapshot.directory, path), snapshot.directory)
    return None if relative.startswith("..") else relative


def _ask_git(directory: Path) -> tuple[set[str], str]:
    """Files under version control, and the commit; ("", nothing) outside a work tree."""
    listed = _git(directory, "ls-files", "--cached", "--recurse-submodules", "-z")
    if listed is None:
        return set(), ""
    head = (_git(directory, "rev-parse", "--short=12", "HEAD") or "without a commit").strip()
    changed = _git(directory, "status", "--porcelain", "--untracked-files=normal", "--", ".")
    return set(_names(listed)), f"{head} with changes" if changed else head


def _untracked(directory: Path) -> set[str]:
    return set(_names(_git(directory, "ls-files", "--others", "--exclude-standard", "-z") or ""))


def _names(listed: str) -> Iterable[str]:
    return (name for name in listed.split("\0") if name)


def _git(directory: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def _walk(directory: Path) -> Iterable[str]:
    for folder, folders, names in os.walk(directory):
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "__pycache__"))
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        ]
        for name in names:
            yield os.path.relpath(os.path.join(folder, name), directory)


def _is_own(path: Path, directory: Path, folder: Path) -> bool:
    """Whether this is a log, a script or an earlier copy: what lies where the copy goes."""
    logs = folder.parent.resolve()
    if logs == directory.resolve():
        return any(part.endswith(folder.suffix) for part in path.relative_to(directory).parts[:-1])
    return logs.is_relative_to(directory.resolve()) and logs in path.resolve().parents


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
