"""How much CPU time others take while we measure. Linux."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpctrain.errors import ConfigError

__all__ = ["LoadMeter", "Reading", "background_load", "busy_ticks", "read_clocks"]

_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
# Interrupts are left out: those of our own loopback traffic are booked there as well, and would
# make Gloo look like another process. Stolen time is what other guests took from this one.
_BUSY = ("user", "nice", "system", "steal")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What the clocks showed at one moment, all in seconds."""

    wall_s: float
    busy_s: float
    """CPU time of all processes since the machine started."""
    own_s: float
    """CPU time of our processes."""


def busy_ticks(stat: str) -> int:
    """Read from the text of /proc/stat how long all cores together were busy, in ticks.

    Raises:
        ConfigError: it has no line for all cores.
    """
    for line in stat.splitlines():
        words = line.split()
        if words[:1] == ["cpu"] and len(words) > 4:
            values = dict(zip(_FIELDS, map(int, words[1:]), strict=False))
            return sum(values.get(name, 0) for name in _BUSY)
    raise ConfigError("/proc/stat has no line 'cpu'; the load can be measured on Linux only")


def background_load(before: Reading, after: Reading, *, num_cores: int) -> float:
    """The share of all cores that others used between two readings, 0 to 1.

    Clocks of processes and of the machine tick differently, so a little may be missing: never less
    than 0.
    """
    elapsed_s = after.wall_s - before.wall_s
    if elapsed_s <= 0 or num_cores < 1:
        raise ConfigError(f"no load over {elapsed_s} s on {num_cores} cores; wait in between")
    foreign_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, foreign_s / (elapsed_s * num_cores)))


def read_clocks() -> Reading:
    """The clocks now; children count when they have ended, as they have between two launches."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = busy_ticks(Path("/proc/stat").read_text())
    return Reading(
        wall_s=time.monotonic(),
        busy_s=ticks / os.sysconf("SC_CLK_TCK"),
        own_s=sum(each.ru_utime + each.ru_stime for each in used),
    )


class LoadMeter:
    """Background load between one call and the next.

    Args:
        processes: Ours, besides this one; they live as long as the meter is used.
    """

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._processes = [psutil.Process(), *processes]
        self._last = self._read()

    def restart(self) -> None:
        """Begin a new span."""
        self._last = self._read()

    def load(self) -> float:
        """The background load since the last restart."""
        return background_load(self._last, self._read(), num_cores=os.cpu_count() or 1)

    def _read(self) -> Reading:
        own_s = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                own_s += times.user + times.system
        ticks = busy_ticks(Path("/proc/stat").read_text())
        return Reading(
            wall_s=time.monotonic(), busy_s=ticks / os.sysconf("SC_CLK_TCK"), own_s=own_s
        )
