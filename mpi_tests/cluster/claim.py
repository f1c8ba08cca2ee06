"""Names for what one test session makes on a machine, and the removal of what dead ones left.

A claim is a directory whose name holds the owner's pid and start time. The network namespaces
made under it carry the claim's name as prefix, so that its processes can be found by where they
live, even when the session that started them was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

from mpi_tests.cluster.command import ClusterError, run_command

__all__ = ["TOOL_LIMIT_S", "claim", "process_ids", "release", "remove_leftovers", "start_time"]

TOOL_LIMIT_S = 20.0
NETNS_DIRECTORY = Path("/run/netns")
_NAME = re.compile(r"hpctrain-(?P<pid>\d+)-(?P<start>\d+)-\d+")


def claim() -> Path:
    """Makes a directory of a new name, which is also the prefix for namespaces."""
    pid = os.getpid()
    owner = f"hpctrain-{pid}-{start_time(pid)}"
    for serial in range(1000):
        directory = Path(tempfile.gettempdir(), f"{owner}-{serial}")
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            # Daemons that give up root must reach their sockets through it, whatever the umask.
            directory.chmod(0o755)
            return directory
    raise ClusterError(f"1000 clusters named {owner}-* exist in {tempfile.gettempdir()}")


def release(directory: Path) -> None:
    """Removes a claim: its processes, its namespaces with their links, then its directory."""
    names = _namespaces(directory)
    deadline = time.monotonic() + TOOL_LIMIT_S
    while alive := [pid for name in names for pid in process_ids(name)]:
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {alive} in {names} do not end")
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for name in names:
        run_command(["ip", "netns", "del", name], timeout_s=TOOL_LIMIT_S, check=False)
    shutil.rmtree(directory, ignore_errors=True)
    if left := _namespaces(directory):
        raise ClusterError(f"network namespaces {left} could not be removed")


def remove_leftovers() -> list[str]:
    """Releases the claims whose owner is dead, and returns their names."""
    removed = []
    for directory in Path(tempfile.gettempdir()).glob("hpctrain-*"):
        found = _NAME.fullmatch(directory.name)
        if found and start_time(int(found["pid"])) != int(found["start"]):
            release(directory)
            removed.append(directory.name)
    return removed


def process_ids(namespace: str) -> list[int]:
    """The processes that live in a network namespace."""
    command = ["ip", "netns", "pids", namespace]
    result = run_command(command, timeout_s=TOOL_LIMIT_S, check=False)
    return [int(word) for word in result.stdout.split()]


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None for a dead one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the command in parentheses, may itself hold spaces and parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _namespaces(directory: Path) -> list[str]:
    return sorted(path.name for path in NETNS_DIRECTORY.glob(f"{directory.name}-*"))
