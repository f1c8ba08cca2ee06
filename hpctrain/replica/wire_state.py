"""The wire of a replica: what it is, in words, and its state from one run to the next.

The rule: a state that all ranks have in common goes to any number of them. A state of each rank's
own goes to the same ranks on the same nodes with the same exchange; otherwise the wire begins anew,
and the log says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.wire import NONE, Wire

__all__ = ["WireUse", "describe_wire", "trouble_with_wire_state"]


def describe_wire(used: str, asked: str, num_nodes: int) -> str:
    """How gradients are sent between nodes, if requested; empty otherwise. Pure."""
    if asked == NONE:
        return ""
    if used == NONE:
        return f"none ({asked} was requested; gradients stay on one node, where they are exact)"
    return f"{used} between {num_nodes} nodes"


def trouble_with_wire_state(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Why a wire cannot resume from the saved state of another, or None. Pure.

    Args:
        saved: What `WireUse.common_state` gave.
        now: What it gives here; empty: there is no wire, or one without a state.
    """
    if not now:
        return "this run has no wire with a state"
    if saved["name"] != now["name"]:
        return f"this run's wire is {now['name']}"
    if "state" in saved:
        return None
    was, are = len(set(saved["nodes"])), len(set(now["nodes"]))
    if was != are:
        return f"it is of {was} nodes, and this run has {are}"
    if list(saved["nodes"]) != list(now["nodes"]):
        return "its ranks were placed otherwise on their nodes"
    if saved["exchange"] != now["exchange"]:
        return f"it is of the exchange {saved['exchange']}, and this run's is {now['exchange']}"
    return None


@dataclass(frozen=True, slots=True)
class WireUse:
    """A wire, and what its state belongs to."""

    wire: Wire
    nodes: Sequence[int]
    """The node of each rank."""
    exchange: str
    """Engine, mode and sizes: what decides which elements are encoded together."""

    def common_state(self) -> dict[str, Any]:
        """What all ranks have in common, for a checkpoint; empty: the wire has no state."""
        if not self.wire.has_state:
            return {}
        about = {"name": self.wire.name, "nodes": list(self.nodes), "exchange": self.exchange}
        return about | ({"state": self.wire.state_dict()} if self.wire.shares_state else {})

    def own_state(self) -> dict[str, Any]:
        """What this rank alone has."""
        return {} if self.wire.shares_state else self.wire.state_dict()
