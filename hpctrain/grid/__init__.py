"""Floor 3: ranks as a grid: data x pipeline x tensor. Factoring and placement need no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy
from hpctrain.grid.factoring import DIMENSIONS, Coordinate, Shape, factorings, fit_shape
from hpctrain.grid.placing import Placement, place

if TYPE_CHECKING:
    from hpctrain.grid.grid import Grid

__all__ = [
    "DIMENSIONS",
    "Coordinate",
    "Grid",
    "Placement",
    "Shape",
    "factorings",
    "fit_shape",
    "place",
]

__getattr__ = lazy(__name__, {".grid": ("Grid",)})
