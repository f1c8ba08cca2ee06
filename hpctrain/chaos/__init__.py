"""Floor 6.5: trainings that are killed, stopped and damaged on purpose, in real processes.

Names are loaded on first use: the command line lists the scenarios without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.chaos.running import Chain, steps_for
    from hpctrain.chaos.scenarios import SCENARIOS, choose
    from hpctrain.chaos.soak import Round, Soak
    from hpctrain.chaos.table import describe_outcome, describe_round, render_rows

__all__ = [
    "SCENARIOS",
    "Chain",
    "Round",
    "Soak",
    "choose",
    "describe_outcome",
    "describe_round",
    "render_rows",
    "steps_for",
]

__getattr__ = lazy(
    __name__,
    {
        ".running": ("Chain", "steps_for"),
        ".scenarios": ("SCENARIOS", "choose"),
        ".soak": ("Round", "Soak"),
        ".table": ("describe_outcome", "describe_round", "render_rows"),
    },
)
