"""Floor 3: layers divided over the tensor dimension of a grid, by patterns of their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy
from hpctrain.tensor_parallel.planning import (
    KINDS,
    Division,
    divided_sizes,
    division_of,
    plan_layers,
    trouble_with_dtensors,
)

if TYPE_CHECKING:
    from hpctrain.tensor_parallel.cross_entropy import vocabulary_cross_entropy
    from hpctrain.tensor_parallel.splitting import split_layers

__all__ = [
    "KINDS",
    "Division",
    "divided_sizes",
    "division_of",
    "plan_layers",
    "split_layers",
    "trouble_with_dtensors",
    "vocabulary_cross_entropy",
]

# torch's DTensor takes seconds to load.
__getattr__ = lazy(
    __name__,
    {".cross_entropy": ("vocabulary_cross_entropy",), ".splitting": ("split_layers",)},
)
