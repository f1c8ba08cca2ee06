"""What others may ask of a replica without reaching into it."""

from __future__ import annotations

from hpctrain.replica.core import Replica

__all__ = ["accumulation_of"]


def accumulation_of(replica: Replica) -> int:
    """Backward calls that make one step."""
    return replica._window.accumulate
