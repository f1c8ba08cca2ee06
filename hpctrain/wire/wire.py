"""What a wire is: it turns gradients into fewer bytes and back.

Inside a node gradients always travel as they are; a wire is for the way between nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

__all__ = ["ENCODABLE", "Summing", "Wire"]

Summing = Literal["encoded", "decoded"]
ENCODABLE = (torch.float32, torch.float64)
"""Other gradients travel as they are."""


class Wire(ABC):
    """Encodes flat float32 or float64 tensors; one object for each replica and rank.

    All ranks encode and decode the same sizes in the same order, so a wire may keep what it learns
    of them.
    """

    name: ClassVar[str]
    sums: ClassVar[Summing] = "decoded"
    """How encoded gradients are added up. `encoded`: by an allreduce of what `encode` gives.
    `decoded`: every node gets a slice of all others, decodes and adds it up, and encodes the sum
    again for all."""

    @abstractmethod
    def num_bytes(self, num_elements: int) -> int:
        """How many bytes that many elements take on the way."""

    @abstractmethod
    def encode(self, values: Tensor, key: str) -> Tensor:
        """What travels, as a flat tensor in memory of its own.

        Args:
            values: What is to be encoded; left as it is.
            key: What these are, for a wire that keeps a state: the same in every step, and another
                one for everything else that this rank encodes in a step.

        Returns:
            Bytes (uint8) where sums are made of what was decoded, else numbers that add up.
        """

    @abstractmethod
    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Write what was encoded into a flat tensor."""
