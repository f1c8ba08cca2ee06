"""Floor 3: number formats, loss scaling and clipping, decided alike on all ranks."""

from __future__ import annotations

from hpctrain.precision.options import LossScaling, PrecisionName
from hpctrain.precision.precision import Precision

__all__ = ["LossScaling", "Precision", "PrecisionName"]
