"""How many processes the kernel has killed for memory, in the control group that this one is in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["count_oom_kills", "event_files"]

_ROOT = Path("/sys/fs/cgroup")


def event_files(groups: str, root: Path = _ROOT) -> list[Path]:
    """Where the kernel counts them, for the text of /proc/self/cgroup. Pure.

    Args:
        groups: Lines of `id:controllers:path`; version 2 has one, with id 0 and no controllers.
        root: Where control groups are mounted.
    """
    found = []
    for line in groups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inside = path.lstrip("/")
        if number == "0" and not controllers:
            # In a container the path is another's, and the mount is our own group.
            found += [root / inside / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            control = "memory.oom_control"
            found += [root / "memory" / inside / control, root / "memory" / control]
    return found


def count_oom_kills(files: Iterable[Path] | None = None) -> int:
    """The count of the first file that can be read; 0 where there is none."""
    try:
        places = event_files(Path("/proc/self/cgroup").read_text()) if files is None else files
    except OSError:
        return 0
    for path in places:
        try:
            match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if match is not None:
            return int(match.group(1))
    return 0
