"""How gradients travel, as a replica sees it: one protocol for arena, node and Horovod modes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.fusion import Arrived
from hpctrain.precision import Gradients
from hpctrain.replica.words import Words

__all__ = ["Mode"]


class Mode(Gradients, Protocol):
    """How gradients travel, between the calls of a replica; see `ArenaMode`."""

    parameters: tuple[torch.nn.Parameter, ...]
    weighs_samples: bool
    """Whether ranks count by their samples; Adasum knows no weights."""

    def fits(self) -> bool:
        """Whether the parameters are still what they were laid out as."""

    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass; `fresh` begins from zero."""

    def take_all(self) -> None:
        """After a pass that nobody announced: take gradients as they lie on the parameters."""

    def edited(self) -> bool:
        """Whether somebody has written to gradients since `settle`."""

    def foreign(self) -> list[str]:
        """Parameters that somebody else's backward pass has written to."""

    def arm(self, control: Words) -> None:
        """Before the last backward pass of a window."""

    def settle(self) -> None:
        """After a backward pass."""

    def exchange(self, control: Words) -> Arrived:
        """Collective: sum all gradients over all ranks."""

    def zero(self) -> bool:
        """Forget all gradients. Collective after an interrupted pass that sent some of them.

        Returns:
            Whether that was an exchange.
        """

    def hide_unused(self, used: frozenset[int] | None) -> None:
        """Give parameters that no rank used no gradient; None: all were used."""

    def has_none(self) -> bool:
        """Whether no parameter has a gradient."""

    def gradients(self) -> list[Tensor | None]:
        """Copies of the gradients as they are now."""

    def add(self, gradients: list[Tensor | None]) -> None:
        """Add gradients that were set aside."""

    def each_alone(self) -> AbstractContextManager[None]:
        """A block in which every rank that steps updates everything by itself."""

    def describe(self) -> list[tuple[str, str]]:
        """What was chosen, in words."""

    def counts(self) -> dict[str, int]:
        """Messages sent and Python hooks called so far."""

    def close(self) -> None:
        """Let the parameters go."""
