"""Floor 2: what goes wrong in a running job. So far: collectives that do not end."""

from __future__ import annotations

from hpctrain.faults.calls import Lane
from hpctrain.faults.ending import EXIT_CODE
from hpctrain.faults.watchdog import Watchdog, start

__all__ = ["EXIT_CODE", "Lane", "Watchdog", "start"]
