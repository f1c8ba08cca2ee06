"""The launches of a sweep as batch jobs: one array for each number of nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.atomic import write_atomically
from hpctrain.batch_systems import Ask, ask_program, find_system, find_template
from hpctrain.bench.local import summarize_log
from hpctrain.bench.sweep import Folder, Measured, Sweep
from hpctrain.errors import ConfigError, JobError
from hpctrain.submit import (
    Ledger,
    Request,
    Site,
    SubmittedJob,
    last_lines,
    log_paths,
    submit,
    task_states,
)

__all__ = ["Batch", "collect_jobs", "group_launches", "submit_sweep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One job of a sweep: its launches are the tasks of an array."""

    keys: tuple[str, ...]
    num_nodes: int
    ranks_per_node: int


def group_launches(folder: Folder, sweep: Sweep, pending: Sequence[tuple[str, int]]) -> list[Batch]:
    """Launches by nodes and ranks a node; baselines of one process have separate jobs. Pure."""
    groups: dict[tuple[int, int], list[str]] = {}
    for name, repeat in pending:
        point = sweep.point(name)
        place = (point.num_nodes, -(-point.num_ranks // point.num_nodes))
        groups.setdefault(place, []).append(folder.key(sweep, name, repeat))
    return [
        Batch(keys=tuple(keys), num_nodes=nodes, ranks_per_node=ranks)
        for (nodes, ranks), keys in sorted(groups.items())
    ]


def submit_sweep(
    folder: Folder,
    sweep: Sweep,
    request: Request,
    site: Site,
    *,
    ledger: Ledger,
    ask: Ask = ask_program,
    num_cores: int,
    python: str = "python",
) -> list[str]:
    """Submit what is still missing, and record which job has which launch.

    Args:
        folder: Where the sweep is; all nodes must see it.
        sweep: What is measured.
        request: Everything of a job but its commands and size.
        site: Where it goes.
        ledger: Remembers jobs.
        ask: Runs the batch system's programs.
        num_cores: Of a node, for the process that has all of them.
        python: The interpreter of the ranks.

    Returns:
        The jobs' ids.
    """
    known = _read_jobs(folder)
    waiting = {key for row in known if not _is_over(row, ask) for key in row["keys"]}
    pending = [
        launch for launch in folder.pending(sweep) if folder.key(sweep, *launch) not in waiting
    ]
    jobs: list[str] = []
    for batch in group_launches(folder, sweep, pending):
        commands = tuple(
            (python, "-m", "hpctrain", "bench", "measure", str(folder.path.absolute()), key)
            for key in batch.keys
        )
        several = len(commands) > 1
        has_arrays = find_system(_batch_of(site)).has_arrays
        job = replace(
            request,
            commands=commands,
            num_nodes=batch.num_nodes,
            ranks_per_node=batch.ranks_per_node,
            cpus_per_rank=max(1, num_cores // batch.ranks_per_node),
            array_size=len(commands) if several else None,
            # One at a time: launches that share a node would be measured with each other.
            array_limit=1 if several and has_arrays else None,
        )
        ids = submit(
            job, site, directory=Path.cwd(), ledger=ledger, show=lambda text: None, ask=ask
        )
        found = [ledger.find(each) for each in ids]
        known += _remember(batch, [asdict(entry) for entry in found if entry is not None])
        for key in batch.keys:
            folder.forget(key)
        _write_jobs(folder, known)
        jobs += ids
    return jobs


def _batch_of(site: Site) -> str:
    return find_template(site.template).batch


def _remember(batch: Batch, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if len(entries) == 1:
        return [{"keys": list(batch.keys), "entry": dict(entries[0])}]
    return [  # where there are no arrays, each launch is a job
        {"keys": [key], "entry": dict(entry)}
        for key, entry in zip(batch.keys, entries, strict=True)
    ]


def collect_jobs(
    folder: Folder, sweep: Sweep, *, say: Callable[[str], None], ask: Ask = ask_program
) -> int:
    """Write down why launches whose jobs have ended left nothing; how many are still to come.

    Raises:
        ConfigError: nothing was submitted for this sweep.
    """
    rows = _read_jobs(folder)
    if not rows:
        raise ConfigError(f"{folder.path} has no jobs; submit them with `hpctrain bench submit`")
    done = folder.measured(sweep)
    have = {folder.key(sweep, *launch) for launch in done}
    left = 0
    for row in reversed(rows):  # of a launch that was submitted again, the newest job counts
        missing = [key for key in row["keys"] if key not in have]
        have.update(missing)
        if not missing:
            continue
        entry = SubmittedJob(**row["entry"])
        states = task_states(entry, ask)
        for key in missing:
            task = row["keys"].index(key) if len(row["keys"]) > 1 else None
            state = states.get(task or 0)
            if state is not None and not state.is_final:
                left += 1
                continue
            point, repeat = folder.launch_of(sweep, key)
            word = state.state if state is not None else "and the batch system no longer lists it"
            why = f"job {entry.job} ended {word}: {_tail(entry, task)}"
            say(f"{point.name}, repeat {repeat + 1}: {why.splitlines()[0]}")
            folder.write(key, Measured(point=point.name, repeat=repeat, wall_s=0.0, why=why))
    return left


def _is_over(row: Mapping[str, Any], ask: Ask) -> bool:
    entry = SubmittedJob(**row["entry"])
    return all(state.is_final for state in task_states(entry, ask).values())


def _tail(entry: SubmittedJob, task: int | None) -> str:
    try:
        return summarize_log(last_lines(log_paths(entry, task)[0], None))
    except JobError as error:
        return str(error)


def _read_jobs(folder: Folder) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads((folder.path / "jobs.json").read_text("utf-8"))
    except FileNotFoundError:
        return []
    return rows


def _write_jobs(folder: Folder, rows: Sequence[Mapping[str, Any]]) -> None:
    path = folder.path / "jobs.json"
    write_atomically(path, json.dumps(list(rows), indent=1))
