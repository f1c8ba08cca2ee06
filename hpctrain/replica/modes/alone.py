"""A single rank: gradients stay where torch puts them, and nothing is exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.fusion import Arrived, Usage
from hpctrain.precision import sum_of_squares
from hpctrain.replica.control_words import ControlWords
from hpctrain.replica.modes.base import TorchGradientsMode

__all__ = ["AloneMode"]


class AloneMode(TorchGradientsMode):
    """What a replica does with gradients that need no exchange: only what was requested."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(names, parameters)
        self._watch(Usage(self.names, self.parameters))

    def exchange(self, control: ControlWords) -> Arrived:
        """Nothing: there is only this rank."""
        self.watch.forget()
        for parameter in self.parameters:  # as after an exchange: dense, and with no graph
            gradient = parameter.grad
            if gradient is not None and gradient.layout is not torch.strided:
                parameter.grad = gradient.detach().to_dense()
            elif gradient is not None and gradient.requires_grad:
                parameter.grad = gradient.detach()
        return Arrived(
            control=torch.tensor(control, dtype=torch.float64), flags=(), all_used_here=True
        )

    def average(self, divisor: float | Tensor) -> None:
        """Turn the sums into averages."""
        kept, _ = self._split(frozenset())
        if kept and (isinstance(divisor, Tensor) or divisor != 1.0):
            torch._foreach_div_(kept, divisor)

    def norm_squared(self, excluded: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Sums of squares without the excluded parameters, and of these."""
        kept, left = self._split(excluded)
        return self._squared(kept), self._squared(left)

    def _squared(self, gradients: list[Tensor]) -> Tensor:
        device = self.parameters[0].device
        if not gradients or any(g.device.type == "cpu" for g in gradients):
            return sum_of_squares(gradients, device)
        # On a GPU all of them by one kernel.
        double = any(g.dtype in (torch.float64, torch.complex128) for g in gradients)
        wide = torch.float64 if double else torch.float32
        norms = torch._foreach_norm(gradients, 2, dtype=None if _alike(gradients, wide) else wide)
        return torch.stack([norm.to(device, wide) for norm in norms]).square().sum()

    def scale(self, factor: Tensor, excluded: frozenset[int], excluded_factor: Tensor) -> None:
        """Multiply, the excluded parameters by a separate factor."""
        for gradients, by in zip(self._split(excluded), (factor, excluded_factor), strict=True):
            if gradients:
                torch._foreach_mul_(gradients, by)

    def clamp(self, limit: float, excluded: frozenset[int]) -> None:
        """Limit each element's size, but for the excluded parameters."""
        for gradient in self._split(excluded)[0]:
            gradient.clamp_(-limit, limit)

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what was chosen."""
        return [("gradients", "torch's own: a single rank exchanges nothing")]

    def counts(self) -> dict[str, int]:
        """Nothing is sent."""
        return {"messages": 0, "hooks": 0, "bytes": 0}

    def close(self) -> None:
        """Take the hooks away."""
        self.usage.close()


def _alike(gradients: Sequence[Tensor], wide: torch.dtype) -> bool:
    """Whether norms come out wide enough by themselves."""
    return all(g.dtype is wide or g.is_complex() for g in gradients)
