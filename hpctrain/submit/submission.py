"""Submits a rendered script, and records the job."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hpctrain.batch_systems import Ask, BatchSystem, Refused, ask_program
from hpctrain.errors import ConfigError, JobError
from hpctrain.submit.ledger import Ledger, SubmittedJob
from hpctrain.submit.plan import make_plan
from hpctrain.submit.rendering import render_plan
from hpctrain.submit.request import Request
from hpctrain.submit.site import Site

__all__ = ["new_folder", "submit", "write_script"]

_MOST_SCRIPTS = 10_000
"""Of one name within one second."""


def submit(
    request: Request,
    site: Site,
    *,
    directory: Path,
    ledger: Ledger,
    show: Callable[[str], None],
    tell: Callable[[str], None] = lambda job: None,
    ask: Ask = ask_program,
) -> list[str]:
    """Write the script next to the logs, show it, submit it and record the job.

    A submission that is refused leaves no script behind.

    Args:
        request: The job.
        site: Where it goes.
        directory: The job's working directory.
        ledger: Where it is recorded.
        show: Is called with the script's text before it is submitted.
        tell: Is called with each id as soon as it is known, before anything else can fail.
        ask: Runs the batch system's programs.

    Returns:
        The job's id; several where the batch system has no arrays.

    Raises:
        ConfigError: the request cannot be rendered.
        JobError: the batch system refuses.
    """
    logs = directory / request.log_dir
    make_plan(dataclasses.replace(request, script=str(logs / f"{request.name}.sh")), site)
    jobs: list[str] = []
    with _new_file(logs, request.name) as path:
        plan = make_plan(dataclasses.replace(request, script=str(path)), site)
        text = render_plan(plan)
        show(text)
        write_script(path, text)
        system = plan.system
        for index in _indices(system, request):
            try:
                jobs.append(system.submit(path, ask, index=index))
            except Refused as error:
                if not jobs:
                    raise
                raise JobError(f"{error}; submitted before that: {', '.join(jobs)}") from error
            tell(jobs[-1])
            entry = SubmittedJob(
                job=jobs[-1],
                batch=plan.template.batch,
                name=request.name,
                site=site.name,
                directory=str(directory),
                script=str(path),
                log_dir=str(logs),
                submitted=_now().strftime("%Y-%m-%dT%H:%M:%SZ"),
                array_size=request.array_size if index is None else None,
            )
            ledger.add(entry)
    return jobs


@contextlib.contextmanager
def _new_file(folder: Path, name: str) -> Iterator[Path]:
    """A path for a script, exclusively; removed again if the job was not accepted.

    Raises:
        ConfigError: nothing can be written there.
    """
    with _claimed(folder, name, ".sh", _touch) as path:
        yield path


@contextlib.contextmanager
def new_folder(folder: Path, name: str, suffix: str) -> Iterator[Path]:
    """A folder next to the scripts, exclusively; removed if the job was not accepted.

    Raises:
        ConfigError: nothing can be written there.
    """
    with _claimed(folder, name, suffix, Path.mkdir) as path:
        yield path


@contextlib.contextmanager
def _claimed(folder: Path, name: str, suffix: str, make: Callable[[Path], None]) -> Iterator[Path]:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    path = _claim(folder, name, suffix, make)
    try:
        yield path
    except (ConfigError, Refused):
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            for each in missing:  # the innermost first; a folder that others use is not empty
                each.rmdir()
        raise


def _touch(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o755))


def _claim(folder: Path, name: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """Make something of a name that was free; exclusively, since others do the same now."""
    stamp = _now().strftime("%Y%m%d-%H%M%S")
    try:
        for number in range(_MOST_SCRIPTS):
            path = folder / f"{name}-{stamp}{f'-{number}' if number else ''}{suffix}"
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                make(path)
                return path
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to ({error}); choose another") from error
    raise ConfigError(f"{folder} has {_MOST_SCRIPTS} scripts of {stamp}; choose another --log-dir")


def write_script(path: Path, text: str) -> None:
    """Write an executable script, and the folder it is in.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}); choose another place") from error


def _indices(system: BatchSystem, request: Request) -> list[int | None]:
    if system.has_arrays or request.array_size is None:
        return [None]
    return list(range(request.array_size))


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
