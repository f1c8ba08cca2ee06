"""Floor 3: number formats, loss scaling and clipping, decided alike on all ranks."""

from __future__ import annotations

from hpctrain.precision.arithmetic import excluded_from_clipping, multiply, sum_of_squares
from hpctrain.precision.casting import Casting
from hpctrain.precision.options import LossScaling, PrecisionName, check_choice, check_parameters
from hpctrain.precision.precision import Precision
from hpctrain.precision.treatment import Gradients, Treated, Treatment

__all__ = [
    "Casting",
    "Gradients",
    "LossScaling",
    "Precision",
    "PrecisionName",
    "Treated",
    "Treatment",
    "check_choice",
    "check_parameters",
    "excluded_from_clipping",
    "multiply",
    "sum_of_squares",
]
