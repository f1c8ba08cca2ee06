"""Floor 3: what training with large batches needs: optimizers, rates, statistics, averages."""

from __future__ import annotations

from hpctrain.optim.batchnorm import SyncBatchNorm, average_batchnorm, sync_batchnorm
from hpctrain.optim.checkpointing import Checkpointed, checkpoint_activations
from hpctrain.optim.ema import EMA
from hpctrain.optim.layerwise import LAMB, LARS
from hpctrain.optim.recipe import Recipe, RecipeSchedule, split_parameters
from hpctrain.optim.several import Several, combine, label_of, members_of, spans_of

__all__ = [
    "EMA",
    "LAMB",
    "LARS",
    "Checkpointed",
    "Recipe",
    "RecipeSchedule",
    "Several",
    "SyncBatchNorm",
    "average_batchnorm",
    "checkpoint_activations",
    "combine",
    "label_of",
    "members_of",
    "spans_of",
    "split_parameters",
    "sync_batchnorm",
]
