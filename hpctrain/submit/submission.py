"""Handing a rendered script over, and remembering what came of it."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.submit.batch import BatchSystem, find_system
from hpctrain.submit.batch.system import Ask, ask_program
from hpctrain.submit.ledger import Entry, Ledger
from hpctrain.submit.plan import make_plan
from hpctrain.submit.render import render_plan
from hpctrain.submit.request import Request
from hpctrain.submit.site import Site

__all__ = ["submit", "write_script"]


def submit(
    request: Request,
    site: Site,
    *,
    directory: Path,
    ledger: Ledger,
    show: Callable[[str], None],
    ask: Ask = ask_program,
) -> list[str]:
    """Write the script beside the logs, show it, hand it over and remember it.

    Args:
        request: The job.
        site: Where it goes.
        directory: The job's working directory.
        ledger: Remembers it.
        show: Is given the script's text before it is handed over.
        ask: Runs the batch system's programs.

    Returns:
        The job's id; several where the batch system has no arrays.

    Raises:
        ConfigError: the request cannot be rendered.
        JobError: the batch system refuses.
    """
    logs = directory / request.log_dir
    path = _free_path(logs, request.name)
    plan = make_plan(dataclasses.replace(request, script=str(path)), site)
    text = render_plan(plan)
    show(text)
    write_script(path, text)
    system = find_system(plan.template.batch)
    jobs = []
    for index in _indices(system, request):
        jobs.append(system.submit(path, ask, index=index))
        entry = Entry(
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


def _free_path(folder: Path, name: str) -> Path:
    stamp = _now().strftime("%Y%m%d-%H%M%S")
    number = 0
    while (path := folder / f"{name}-{stamp}{f'-{number}' if number else ''}.sh").exists():
        number += 1
    return path


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
