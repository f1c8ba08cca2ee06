"""Floor 3: layers divided over the tensor dimension of a grid, by patterns of their names."""

from __future__ import annotations

from hpctrain.tensor_parallel.cross_entropy import vocabulary_cross_entropy
from hpctrain.tensor_parallel.gradients import average_gradients, clip_gradients
from hpctrain.tensor_parallel.planning import KINDS, divided_sizes, plan_layers
from hpctrain.tensor_parallel.splitting import split_layers

__all__ = [
    "KINDS",
    "average_gradients",
    "clip_gradients",
    "divided_sizes",
    "plan_layers",
    "split_layers",
    "vocabulary_cross_entropy",
]
