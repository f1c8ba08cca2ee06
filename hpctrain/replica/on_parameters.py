"""What modes share: gradients as they lie on the parameters, before and after an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hpctrain.fusion import Usage
from hpctrain.replica.words import Words

__all__ = ["OnParameters", "OnTorchsOwn"]


class OnParameters:
    """Gradients of a list of parameters, wherever they are kept."""

    parameters: tuple[torch.nn.Parameter, ...]
    weighs_samples = True

    def hide_unused(self, used: frozenset[int] | None) -> None:
        """Give parameters that no rank used no gradient at all: None is not zero."""
        if used is not None:
            for index, parameter in enumerate(self.parameters):
                if index not in used:
                    parameter.grad = None

    def has_none(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(p.grad is None for p in self.parameters)

    def gradients(self) -> list[Tensor | None]:
        """Copies of the gradients as they are now."""
        return [None if p.grad is None else p.grad.clone() for p in self.parameters]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients that were set aside."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)

    def each_alone(self) -> AbstractContextManager[None]:
        """Every rank updates everything in any case."""
        return nullcontext()


class OnTorchsOwn(OnParameters):
    """Backward begins without gradients and leaves them where torch puts them."""

    usage: Usage
    _strays: list[tuple[int, int]] | None = None
    _closing = False

    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass: where a new window begins, there are no gradients."""
        if fresh:
            self.zero()
            for parameter in self.parameters:
                parameter.grad = None
        self.usage.hook()

    def edited(self) -> bool:
        """Whether somebody has written to gradients since `settle`."""
        return self._strays is not None and self._strays != self._fingerprint()

    def foreign(self) -> list[str]:
        """Parameters that a backward pass of somebody else's has written to."""
        return self.usage.unsettled()

    def arm(self, control: Words) -> None:
        """Before the last backward pass of a window."""
        self._closing = True

    def settle(self) -> None:
        """After a backward pass."""
        self.usage.settle()
        self._strays = None if self._closing else self._fingerprint()
        self._closing = False

    def take_all(self) -> None:
        """Gradients are where torch has put them: an exchange takes them from there."""
        self.usage.settle()
        self._strays = None

    def zero(self) -> bool:
        """Forget all gradients."""
        self.usage.settle()
        self._strays = None
        return False

    def _fingerprint(self) -> list[tuple[int, int]]:
        return [(id(g), -1 if g is None else g._version) for g in (p.grad for p in self.parameters)]
