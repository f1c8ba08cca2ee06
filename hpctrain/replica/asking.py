"""What others may ask of a replica without reaching into it."""

from __future__ import annotations

from hpctrain.replica.replica import Replica

__all__ = ["accumulation_of", "measure_norm"]


def accumulation_of(replica: Replica) -> int:
    """Backward calls that make one step."""
    return replica._window.accumulate


def measure_norm(replica: Replica, measured: bool) -> None:
    """Whether exchanges from here on compute the norm of the gradients, for `Step.norm`.

    Clipping by norm and loss scaling compute it in any case. The same on every rank: where ranks
    share memory it is a collective.
    """
    replica._treatment.measures_norm = measured
