"""Floor 2: faults of a running job: hangs, deaths, signals, walltime, weights that drift.

FaultKind needs torch (the sentinel, injected faults) is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy
from hpctrain.faults.allocation import ask_job, time_left_s
from hpctrain.faults.boundary import Agreed, Boundary, BoundaryMessage, Source
from hpctrain.faults.calls import CallLog
from hpctrain.faults.governor import Governor, Pace
from hpctrain.faults.monitor import EXIT_CODE
from hpctrain.faults.preemption import SIGNALS, Preemption
from hpctrain.faults.watchdog import Watchdog, start, watch_world

if TYPE_CHECKING:
    from hpctrain.faults.injection import CHAOS_VARIABLE, FaultKind, Injection, injection_of
    from hpctrain.faults.sentinel import Sentinel

__all__ = [
    "CHAOS_VARIABLE",
    "EXIT_CODE",
    "SIGNALS",
    "Agreed",
    "Boundary",
    "BoundaryMessage",
    "CallLog",
    "FaultKind",
    "Governor",
    "Injection",
    "Pace",
    "Preemption",
    "Sentinel",
    "Source",
    "Watchdog",
    "ask_job",
    "injection_of",
    "start",
    "time_left_s",
    "watch_world",
]

__getattr__ = lazy(
    __name__,
    {
        ".injection": ("CHAOS_VARIABLE", "FaultKind", "Injection", "injection_of"),
        ".sentinel": ("Sentinel",),
    },
)
