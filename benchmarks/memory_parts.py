"""What of a process is data, by /proc/PID/smaps. Pure."""

from __future__ import annotations

import re

__all__ = ["data_kib"]

_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")
_OURS = ("/dev/shm/", "hpctrain-")


def data_kib(smaps: str) -> int:
    """Sum the proportional set size (PSS) of memory that holds data, in KiB.

    A page that several processes map counts as its fraction in each, so that the sum over the ranks
    of a node is what the node holds. Libraries and other files do not count.
    """
    total, counts = 0, False
    for line in smaps.splitlines():
        header = _HEADER.match(line)
        if header:
            name = header[1]
            counts = not name or name.startswith("[") or any(word in name for word in _OURS)
        elif counts and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total
