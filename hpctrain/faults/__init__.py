"""Floor 2: what goes wrong in a running job: hangs, deaths, signals, walltime, weights that drift.

What needs torch is imported where it is used: `faults.sentinel`, `faults.nonfinite`.
"""

from __future__ import annotations

from hpctrain.faults.allocation import time_left_s
from hpctrain.faults.boundary import Agreed, Boundary, Said, Word
from hpctrain.faults.calls import Lane
from hpctrain.faults.ending import EXIT_CODE
from hpctrain.faults.governor import Governor, Pace
from hpctrain.faults.preemption import Preemption
from hpctrain.faults.watchdog import Watchdog, start, watch_world

__all__ = [
    "EXIT_CODE",
    "Agreed",
    "Boundary",
    "Governor",
    "Lane",
    "Pace",
    "Preemption",
    "Said",
    "Watchdog",
    "Word",
    "start",
    "time_left_s",
    "watch_world",
]
