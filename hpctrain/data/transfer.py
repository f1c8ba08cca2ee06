"""Batches on their way to the device: pinned, on a stream of their own, beside the computation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hpctrain.data.source import Batch
from hpctrain.data.structure import leaves, map_leaves

__all__ = ["Sent", "Transfer"]


class Sent(NamedTuple):
    """A batch whose copy may still be under way."""

    batch: Batch
    done: torch.cuda.Event | None


class Transfer:
    """Copies batches to a device. `send` may run in a thread; `receive` runs in the loop's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def is_idle(self) -> bool:
        """Whether batches are where they should be from the start."""
        return self.device.type == "cpu"

    def send(self, batch: Batch) -> Sent:
        """Begin the copy; what is no tensor stays what it is."""
        if self._stream is None:
            return Sent(map_leaves(self._move, batch), None)
        with torch.cuda.stream(self._stream):
            moved = map_leaves(self._move, batch)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return Sent(moved, done)

    def _move(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.device == self.device:
            return leaf
        if leaf.device.type == "cpu" and self.device.type == "cuda":
            leaf = leaf.pin_memory()  # torch keeps it until the copy is over
        return leaf.to(self.device, non_blocking=True)

    def receive(self, sent: Sent) -> Batch:
        """The batch, for the current stream: computation on it waits for the copy, Python not."""
        if sent.done is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.done)
            for _, leaf in leaves(sent.batch):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                    leaf.record_stream(current)
        return sent.batch
