"""Which modules of a divided model have run: ranks that share layers must run the same ones.

Two layers of one shape, one on each rank, fit together without an error, and make no sense.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["ModuleOrder"]

_FACTOR = 0x5DEECE66D
_PERIOD = 1 << 48
"""Of digests: they travel in float64."""


class ModuleOrder:
    """A number for the modules that have run, in their order.

    Args:
        model: Divided; its modules with parameters of their own are hooked.
    """

    def __init__(self, model: nn.Module) -> None:
        self._digest = 0
        for number, module in enumerate(model.modules(), start=1):
            if any(p is not None for p in module._parameters.values()):
                module.register_forward_pre_hook(partial(self._note, number))

    def _note(self, number: int, module: nn.Module, given: Any) -> None:
        if not torch.compiler.is_compiling():  # it would compile again for every digest
            self._digest = (self._digest * _FACTOR + number) % _PERIOD

    def take(self) -> int:
        """The number since the last call; all ranks that share layers must have the same."""
        taken, self._digest = self._digest, 0
        return taken
