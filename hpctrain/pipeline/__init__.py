"""Floor 4: a model in stages on several ranks, which micro-batches pass one after the other.

Names are loaded on first use: balancing stages needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.pipeline.balancing import LayerCost, balance_stages
    from hpctrain.pipeline.chain import chain_of
    from hpctrain.pipeline.cutting import Cut, StageModel
    from hpctrain.pipeline.flow import SCHEDULES
    from hpctrain.pipeline.micro_batches import divide_batch
    from hpctrain.pipeline.raised import (
        describe_raised,
        needs_values,
        quiet_fake_tensors,
        shown_tensors,
    )
    from hpctrain.pipeline.running import PipelineRunner, PreparedBatch
    from hpctrain.pipeline.splitting import cut_model
    from hpctrain.pipeline.state import StageState

__all__ = [
    "SCHEDULES",
    "Cut",
    "LayerCost",
    "PipelineRunner",
    "PreparedBatch",
    "StageModel",
    "StageState",
    "balance_stages",
    "chain_of",
    "cut_model",
    "describe_raised",
    "divide_batch",
    "needs_values",
    "quiet_fake_tensors",
    "shown_tensors",
]

__getattr__ = lazy(
    __name__,
    {
        ".balancing": ("LayerCost", "balance_stages"),
        ".chain": ("chain_of",),
        ".cutting": ("Cut", "StageModel"),
        ".flow": ("SCHEDULES",),
        ".micro_batches": ("divide_batch",),
        ".raised": ("describe_raised", "needs_values", "quiet_fake_tensors", "shown_tensors"),
        ".running": ("PipelineRunner", "PreparedBatch"),
        ".splitting": ("cut_model",),
        ".state": ("StageState",),
    },
)
