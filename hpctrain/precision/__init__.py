"""Floor 3: number formats, loss scaling and clipping, with the same decisions on all ranks."""

from __future__ import annotations

from hpctrain.precision.casting import Casting
from hpctrain.precision.gradients import (
    Gradients,
    ScaleAndClip,
    UpdateResult,
    excluded_from_clipping,
    multiply,
    sum_of_squares,
)
from hpctrain.precision.loss_scaling import (
    LossScaling,
    PrecisionName,
    check_choice,
    check_parameters,
)
from hpctrain.precision.precision import Precision

__all__ = [
    "Casting",
    "Gradients",
    "LossScaling",
    "Precision",
    "PrecisionName",
    "ScaleAndClip",
    "UpdateResult",
    "check_choice",
    "check_parameters",
    "excluded_from_clipping",
    "multiply",
    "sum_of_squares",
]
