"""What a wire is: it turns gradients into fewer bytes and back.

Inside a node gradients are always exchanged as they are; a wire is used between nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hpctrain.errors import ConfigError

__all__ = ["ENCODABLE", "Summing", "Wire"]

Summing = Literal["encoded", "decoded"]
ENCODABLE = (torch.float32, torch.float64)
"""Other gradients are sent as they are."""


class Wire(ABC):
    """Encodes flat float32 or float64 tensors; one object for each replica and rank.

    A wire may keep a state (what rounding has left out, what it has learned of earlier gradients)
    by the keys that it is given. Then it has `state_dict` and `load_state_dict`, and checkpoints
    carry it.
    """

    name: ClassVar[str]
    sums: ClassVar[Summing] = "decoded"
    """How encoded gradients are added up. `encoded`: by an allreduce of what `encode` gives.
    `decoded`: every node gets a slice of all others, decodes and adds it up, and encodes the sum
    again for all."""
    shares_state: ClassVar[bool] = False
    """Whose a state is. True: all ranks have the same, and it goes to any number of them. False:
    each rank has its own; on other nodes the wire begins anew, and the log says so."""

    @property
    def has_state(self) -> bool:
        """Whether there is something to save; the same on all ranks."""
        return type(self).state_dict is not Wire.state_dict

    @abstractmethod
    def num_bytes(self, num_elements: int) -> int:
        """How many bytes that many elements take on the way."""

    @abstractmethod
    def encode(self, values: Tensor, key: str) -> Tensor:
        """The encoded data, as a flat tensor in its own memory.

        Args:
            values: What is to be encoded; left as it is. May have infinities or NaN, in a step that
                will be skipped: they must arrive as such, and not stay in a state.
            key: What these are, for a wire that keeps a state: the same in every step, and another
                one for everything else that this rank encodes in a step.

        Returns:
            Bytes (uint8) where sums are made of what was decoded, else numbers that add up.
        """

    @abstractmethod
    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Write what was encoded into a flat tensor."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on: plain values, tensors, mappings. The default: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, on the same exchange; from {}: begin anew.

        The tensors may be kept.

        Raises:
            ConfigError: there is a state, and this wire keeps none.
        """
        if state:
            raise ConfigError(f"the wire {self.name} keeps no state; give it {{}}")
