"""Which checkpoints there are: read from the directory itself, for a file could lie. No MPI."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.manifest import Manifest, read_manifest
from hpctrain.checkpoint.naming import number_of, step_of
from hpctrain.errors import CheckpointError

__all__ = ["Entry", "complete_in", "list_checkpoints", "next_number", "quick_check"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A checkpoint in a directory."""

    path: Path
    number: int
    step: int
    manifest: Manifest | None
    trouble: str | None
    """What is wrong with it at first sight (manifest, missing files, sizes), or None."""


def list_checkpoints(directory: Path) -> list[Entry]:
    """All checkpoints of a directory, oldest first, damaged ones included.

    Looks at manifests, files and their sizes, not at what is in them: `verify` does.

    Raises:
        CheckpointError: the directory is there and cannot be read.
    """
    entries = []
    for path in _children(directory):
        number, step = number_of(path), step_of(path)
        if number is None or step is None:
            continue
        manifest, trouble = quick_check(path)
        entries.append(
            Entry(path=path, number=number, step=step, manifest=manifest, trouble=trouble)
        )
    return sorted(entries, key=lambda entry: (entry.number, entry.step))


def complete_in(directory: Path) -> list[Path]:
    """All that are called as a complete checkpoint is; nothing is read."""
    return [path for path in _children(directory) if step_of(path) is not None]


def quick_check(path: Path) -> tuple[Manifest | None, str | None]:
    """The manifest of a checkpoint, and what is wrong as far as names and sizes tell."""
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
