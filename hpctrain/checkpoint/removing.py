"""Removing checkpoints that need not stay, and what killed saves have left behind. No MPI."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from hpctrain import log
from hpctrain.checkpoint.catalog import list_checkpoints
from hpctrain.checkpoint.finishing import OWNER
from hpctrain.checkpoint.naming import is_leftover, trash_name
from hpctrain.checkpoint.retention import Candidate, Keep, choose_removals

__all__ = [
    "await_own_writing",
    "describe_owner",
    "in_writing",
    "is_abandoned",
    "is_alive_elsewhere",
    "owner_of",
    "remove",
    "retain",
    "sweep",
]

_PATIENCE_S = 24 * 3600.0
"""After which nobody can still be writing: no job waits that long for a disk."""
_NAMELESS_PATIENCE_S = 600.0
"""The same for a directory whose owner was killed before it could say who it is."""

_NAP_S = 0.01

in_writing: set[Path] = set()
"""What this process is writing: another of its stores must not take it for a leftover."""


def await_own_writing(directory: Path, timeout_s: float) -> Path | None:
    """Wait for what other stores of this process still write there; returns what did not end."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = next((path for path in list(in_writing) if path.parent == directory), None)
        if left is None or time.monotonic() > deadline:
            return left
        time.sleep(_NAP_S)


def describe_owner(job_id: str | None) -> dict[str, object]:
    """Who writes here, so that others know whether they still do."""
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "process": process.pid,
        "started": process.create_time(),
        "job": job_id,
    }


def is_abandoned(
    owner: Mapping[str, Any] | None,
    me: Mapping[str, Any],
    *,
    age_s: float,
    is_alive: Callable[[int, float], bool],
) -> bool:
    """Whether nobody writes there any more.

    Args:
        owner: Who made it, or None if that cannot be read.
        me: Who asks.
        age_s: Time since something was written there.
        is_alive: Whether a process of this host that started then still runs.
    """
    if age_s > _PATIENCE_S:
        return True
    if owner is None:
        return age_s > _NAMELESS_PATIENCE_S
    mine = ("host", "process", "started")
    if all(owner[key] == me[key] for key in mine):
        return True  # one save at a time, and it is not the one that asks, nor `in_writing`
    if owner["host"] == me["host"]:
        return not is_alive(int(owner["process"]), float(owner["started"]))
    # A job that the batch system has started again has the number of the one that was killed.
    return owner["job"] is not None and owner["job"] == me["job"]


def sweep(directory: Path, me: Mapping[str, Any], *, but: Path | None = None) -> list[Path]:
    """Remove what saves and removals that never came to their end have left; returns what."""
    swept = []
    for path in sorted(directory.iterdir()):
        if path == but or path in in_writing or not is_leftover(path):
            continue
        is_trash = path.name.startswith(".trash-")
        if is_trash or is_abandoned(owner_of(path), me, age_s=_age_s(path), is_alive=_is_alive):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def remove(path: Path) -> None:
    """Remove a checkpoint: it stops being one in one move."""
    trash = path.with_name(trash_name(path.name, secrets.token_hex(4)))
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def retain(directory: Path, keep: Keep) -> list[Path]:
    """Remove what need not stay; returns what was removed. What cannot be is warned about."""
    entries = list_checkpoints(directory)
    candidates = [
        Candidate(
            number=entry.number,
            saved_at=entry.manifest.saved_at if entry.manifest else 0.0,
            metrics=entry.manifest.metrics if entry.manifest else {},
            is_valid=entry.trouble is None,
        )
        for entry in entries
    ]
    going = set(choose_removals(candidates, keep))
    removed = []
    for entry in entries:
        if entry.number in going:
            try:
                remove(entry.path)
            except OSError as error:
                log.warn(f"{entry.path} need not stay and cannot be removed ({error.strerror})")
            else:
                removed.append(entry.path)
    return removed


def is_alive_elsewhere(path: Path) -> bool:
    """Whether another process of this host has written this, and still runs."""
    owner, me = owner_of(path), describe_owner(None)
    if owner is None or owner["host"] != me["host"] or owner["process"] == me["process"]:
        return False
    return _is_alive(int(owner["process"]), float(owner["started"]))


def owner_of(path: Path) -> dict[str, Any] | None:
    """Who has written this, as `describe_owner` says it; None if that cannot be read."""
    try:
        told = json.loads((path / OWNER).read_text())
        return told if {"host", "process", "started", "job"} <= told.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _age_s(path: Path) -> float:
    newest = 0.0
    for folder, _, names in os.walk(path):
        for name in (".", *names):
            try:
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
            except OSError:
                continue
    return time.time() - newest


def _is_alive(process: int, started: float) -> bool:
    try:
        return abs(psutil.Process(process).create_time() - started) < 1.0
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
