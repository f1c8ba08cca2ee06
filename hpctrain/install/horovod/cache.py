"""The folder of one cached wheel: there with a record of its bindings, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

__all__ = ["RECORD_NAME", "cached_wheel", "clean_leftovers", "staging_folder", "store"]

RECORD_NAME = "hpctrain-build.json"
_STAGING = "staging-"


def cached_wheel(home: Path) -> Path | None:
    """The finished wheel in `home`, if there is one."""
    wheels = sorted(home.glob("horovod-*.whl"))
    return wheels[0] if wheels and (home / RECORD_NAME).is_file() else None


def staging_folder(home: Path) -> Path:
    """Make an empty folder beside the final place, so that moving a wheel there is atomic."""
    folder = home / f"{_STAGING}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def store(wheel: Path, home: Path, bound: Mapping[str, str | None]) -> Path:
    """Move a finished wheel into the cache: the record first, the wheel last and at once."""
    record = wheel.parent / RECORD_NAME
    record.write_text(json.dumps(bound, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(record, home / RECORD_NAME)
    final = home / wheel.name
    os.replace(wheel, final)
    return final


def clean_leftovers(home: Path, work_root: Path, work_prefix: str) -> None:
    """Remove what killed builds of this key left behind; the caller holds the key's lock."""
    leftovers = [*home.glob(f"{_STAGING}*"), *work_root.glob(f"{work_prefix}*")]
    for folder in leftovers:
        # Only our own: in a shared /tmp another user's folder of the same name is theirs.
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
