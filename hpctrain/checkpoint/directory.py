"""A directory of checkpoints: which there are, which stay, and who saves into it. No torch, no MPI.

What there is is read from the directory itself: a file that says so could be wrong. Removing is one
rename first, so that half a checkpoint is never taken for one.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from hpctrain import log
from hpctrain.checkpoint.format import (
    OWNER,
    Manifest,
    check_file,
    checkpoint_name,
    is_leftover,
    number_of,
    read_manifest,
    step_of,
    trash_name,
)
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.world import poll

__all__ = [
    "Entry",
    "Keep",
    "Neighbours",
    "await_own_writing",
    "choose_best",
    "choose_removals",
    "complete_in",
    "describe_owner",
    "in_writing",
    "is_abandoned",
    "is_alive_elsewhere",
    "list_checkpoints",
    "next_number",
    "owner_of",
    "quick_check",
    "read_metric",
    "remove",
    "retain",
    "sweep",
    "verify",
]

_DIRECTIONS = ("min", "max")
_PATIENCE_S = 24 * 3600.0
"""After this no process can still be writing: no job waits that long for a disk."""
_NAMELESS_PATIENCE_S = 600.0
"""The same for a directory whose owner was killed before it wrote its identity."""
_NAP_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A checkpoint in a directory."""

    path: Path
    number: int
    step: int
    manifest: Manifest | None = None
    trouble: str | None = None
    """What a quick check (manifest, missing files, sizes) found wrong, or None."""
    saved_at: float = 0.0
    """Seconds since 1970."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def note(self) -> Any:
        """What was noted when it was saved; None: nothing, or it cannot be read."""
        from hpctrain.checkpoint.tree import unflatten  # needs torch, which listing does without

        return None if self.manifest is None else unflatten(self.manifest.note, {})


def list_checkpoints(directory: Path) -> list[Entry]:
    """All checkpoints of a directory, oldest first, damaged ones included.

    Checks manifests, files and their sizes, not their contents: `verify` does.

    Raises:
        CheckpointError: the directory is there and cannot be read.
    """
    entries = []
    for path in _children(directory):
        number, step = number_of(path), step_of(path)
        if number is None or step is None:
            continue
        manifest, trouble = quick_check(path)
        entry = Entry(path=path, number=number, step=step, manifest=manifest, trouble=trouble)
        if manifest is not None:
            entry = replace(entry, saved_at=manifest.saved_at, metrics=manifest.metrics)
        entries.append(entry)
    return sorted(entries, key=lambda entry: (entry.number, entry.step))


def complete_in(directory: Path) -> list[Path]:
    """All that are called as a complete checkpoint is; nothing is read."""
    return [path for path in _children(directory) if step_of(path) is not None]


def quick_check(path: Path) -> tuple[Manifest | None, str | None]:
    """The manifest of a checkpoint, and what is wrong by names and sizes."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return None, str(error)
    for file in manifest.files:
        try:
            size = os.stat(path / file.name).st_size
        except FileNotFoundError:
            return manifest, f"{path / file.name} is missing"
        except OSError as error:
            return manifest, f"{path / file.name} cannot be read ({error.strerror})"
        if size < file.num_bytes:
            return manifest, (
                f"{path / file.name} is truncated: {size} bytes of {file.num_bytes} are there"
            )
        if size > file.num_bytes:
            return manifest, (f"{path / file.name} has {size} bytes; {file.num_bytes} were written")
    return manifest, None


def verify(path: Path) -> list[str]:
    """Read a whole checkpoint and compare all checksums; returns what is wrong."""
    manifest, trouble = quick_check(path)
    if manifest is None:
        return [str(trouble)]
    wrong = [check_file(path, file, manifest.block_bytes) for file in manifest.files]
    return [text for text in wrong if text is not None]


def next_number(directory: Path) -> int:
    """A number above all that are in use, by leftovers too."""
    used = [number for path in _children(directory) if (number := number_of(path)) is not None]
    return max(used, default=0) + 1


def _children(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read ({error.strerror})") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Which checkpoints to keep when there is a new one; any rule can keep one."""

    last: int = 3
    """How many of the newest to keep. With two or more there is another if the newest is
    damaged."""
    best: str | None = None
    """`min:loss` or `max:accuracy`: the best by a metric that was given to `save`."""
    best_count: int = 1
    """How many of the best to keep."""
    every_hours: float | None = None
    """Keep one for every so many hours of the run, permanently."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("last", "best_count"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"{name}={number!r} must be a whole number of at least 1")
        if self.best is not None:
            read_metric(self.best)
        if self.every_hours is not None and not 0 < self.every_hours < math.inf:
            raise ConfigError(f"every_hours={self.every_hours!r} must be a number above 0")


def choose_removals(entries: Sequence[Entry], keep: Keep) -> list[int]:
    """The numbers of those that go.

    Damaged ones count for nothing: as many valid ones stay as without them. They go themselves
    when as many newer valid ones are there as are kept.
    """
    ordered = sorted(entries, key=lambda entry: entry.number)
    valid = [entry for entry in ordered if entry.trouble is None]
    newest = valid[-keep.last :]
    stay = {entry.number for entry in newest}
    stay |= _best(valid, keep)
    stay |= _one_every(valid, keep)
    if len(newest) < keep.last:
        stay |= {entry.number for entry in ordered if entry.trouble is not None}
    else:
        oldest = newest[0].number
        stay |= {c.number for c in ordered if c.trouble is not None and c.number > oldest}
    return [entry.number for entry in ordered if entry.number not in stay]


def read_metric(best: str) -> tuple[float, str]:
    """What to multiply a metric by so that less is better, and its name.

    Raises:
        ConfigError: it is neither `min:METRIC` nor `max:METRIC`.
    """
    direction, _, metric = best.partition(":")
    if direction not in _DIRECTIONS or not metric:
        raise ConfigError(f"best={best!r} must be min:METRIC or max:METRIC, such as min:loss")
    return (1.0 if direction == "min" else -1.0), metric


def choose_best(valid: Sequence[Entry], best: str) -> list[int]:
    """The numbers of those that have the metric, the best first; of equals the newer."""
    sign, metric = read_metric(best)
    measured = [
        (sign * entry.metrics[metric], -entry.number)
        for entry in valid
        if not math.isnan(entry.metrics.get(metric, math.nan))
    ]
    return [-number for _, number in sorted(measured)]


def _best(valid: Sequence[Entry], keep: Keep) -> set[int]:
    if keep.best is None:
        return set()
    return set(choose_best(valid, keep.best)[: keep.best_count])


def _one_every(valid: Sequence[Entry], keep: Keep) -> set[int]:
    """The oldest, and each that is this many hours after the previous one."""
    stay: set[int] = set()
    if keep.every_hours is None:
        return stay
    last = -math.inf
    for entry in valid:
        if entry.saved_at - last >= 3600 * keep.every_hours:
            stay.add(entry.number)
            last = entry.saved_at
    return stay


in_writing: set[Path] = set()
"""What this process is writing, so that its other stores do not treat it as a leftover."""


def await_own_writing(directory: Path, timeout_s: float) -> Path | None:
    """Wait for what other stores of this process still write there; returns what did not end."""

    def unfinished() -> Path | None:
        return next((path for path in list(in_writing) if path.parent == directory), None)

    poll(lambda: unfinished() is None, timeout_s=timeout_s, longest_nap_s=_NAP_S)
    return unfinished()


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
    """Whether no process writes there any more.

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
    """Remove what interrupted saves and removals left behind; return what was removed."""
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
    going = set(choose_removals(entries, keep))
    removed = []
    for entry in entries:
        if entry.number in going:
            try:
                remove(entry.path)
            except OSError as error:
                log.warn(
                    f"{entry.path} is no longer needed and cannot be removed ({error.strerror})"
                )
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


class Neighbours:
    """One store's record of its directory; on rank 0.

    Args:
        directory: Of checkpoints.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: set[str] = set()
        self._newest = 0

    def look(self) -> None:
        """Everything that is there now may be resumed from."""
        for path in complete_in(self._directory):
            self._add(path.name)

    def wrote(self, number: int, step: int) -> None:
        """This store writes such a checkpoint."""
        self._add(checkpoint_name(number, step))

    def find_other_writer(self) -> str | None:
        """Who else has saved here since, and what to do about it; None: no one."""
        for path in complete_in(self._directory):
            if path.name not in self._known and (number_of(path) or 0) >= self._newest:
                return self._describe(path)
        return None

    def find_running_writer(self) -> str | None:
        """Which other process of this host wrote the newest checkpoint and still runs, or None."""
        newest = max(complete_in(self._directory), key=lambda p: number_of(p) or 0, default=None)
        return self._describe(newest) if newest is not None and is_alive_elsewhere(newest) else None

    def _add(self, name: str) -> None:
        self._known.add(name)
        self._newest = max(self._newest, number_of(name) or 0)

    def _describe(self, path: Path) -> str:
        owner = owner_of(path)
        by = "another process"
        if owner is not None:
            job = f", job {owner['job']}" if owner["job"] else ""
            by = f"process {owner['process']} on {owner['host']}{job}"
        return (
            f"{path} was saved by {by}, which saves into the same directory: each would resume "
            "from the other's checkpoints and remove them; end one of the jobs, give each its own "
            "directory, or several replicas of one job to one Saver"
        )
