"""What ranks tell the job script that started them: small files in a folder that it names.

The script restarts a job only while its checkpoints advance, and keeps away from a node that
failed. It cannot see either by itself: the exit code is one number, and the shell has neither
where checkpoints are nor which rank died first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from hpctrain.atomic import write_atomically
from hpctrain.world.launcher import Launch

__all__ = ["note_checkpoint", "note_exit", "note_failed_hosts"]


def note_checkpoint(launch: Launch, directory: Path, step: int) -> None:
    """A checkpoint of this step is complete; each directory of checkpoints has a note of its own.

    Args:
        launch: How this process was started; nothing happens where no script listens.
        directory: Of the checkpoints.
        step: The step that was saved.
    """
    name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
    _leave(launch, f"checkpoint-{name}", f"{step} {directory}\n")


def note_exit(launch: Launch, code: int) -> None:
    """This rank ends with such a code; the first that is noted counts.

    Launchers return their own codes, and ranks that end because of another report nothing.
    """
    if code != 0:
        _leave(launch, "code", f"{code}\n", replace=False)


def note_failed_hosts(launch: Launch, hosts: Iterable[str]) -> None:
    """Ranks of these hosts are gone. The first who says so is right: others are its victims."""
    text = "".join(f"{host}\n" for host in dict.fromkeys(hosts))
    if text:
        _leave(launch, "failed", text, replace=False)


def _leave(launch: Launch, name: str, text: str, *, replace: bool = True) -> None:
    """Write a note completely or not at all: a job can run without it."""
    if launch.notes_dir is None:
        return
    path = Path(launch.notes_dir) / name
    with contextlib.suppress(OSError):
        write_atomically(path, text, replace=replace)
