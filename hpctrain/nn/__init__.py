"""Floor 3: layers of fewer parameters: weights as tensor trains."""

from __future__ import annotations

from hpctrain.nn.factorising import factorise
from hpctrain.nn.factors import TrainShape, balanced_factors
from hpctrain.nn.layers import TTEmbedding, TTLinear
from hpctrain.nn.report import Factorised, TrainReport

__all__ = [
    "Factorised",
    "TTEmbedding",
    "TTLinear",
    "TrainReport",
    "TrainShape",
    "balanced_factors",
    "factorise",
]
