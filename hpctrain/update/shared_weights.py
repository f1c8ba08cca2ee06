"""Weights that a node holds once: every rank's parameters are views of the same memory.

The views are each rank's own to write to: what a user's code writes to a parameter (clamping it
after a step) goes to copies of those pages that this rank alone sees. The next update takes the
owners' edits in, and all ranks then see the shared weights again. So an edit that every rank makes
is made once, and one made through `.data` or numpy is found as well: the kernel shows who has pages
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.fusion import like_parameter
from hpctrain.update.pieces import flat_memory
from hpctrain.update.sharing import Fragment

if TYPE_CHECKING:
    from hpctrain.engines import NodeGroup
    from hpctrain.world import SharedBlock

__all__ = ["SharedWeights"]


class SharedWeights:
    """Collective to make: moves parameters into the block, whose weights they become.

    Args:
        group: The ranks of the node.
        block: Node-shared memory, with a byte for each rank after the weights, and a view of all.
        starts: Where each parameter begins in the block, and at last where the bytes for ranks do.
        parameters: Dense, equal on all ranks.
        own: The fragments that this rank updates.
    """

    def __init__(
        self,
        group: NodeGroup,
        block: SharedBlock,
        starts: Sequence[int],
        parameters: Sequence[torch.nn.Parameter],
        own: Sequence[Fragment],
    ) -> None:
        self._parameters = parameters
        self._own = own
        *starts, end = starts
        self.flats = [
            block.tensor(p.dtype, start=start, num_elements=p.numel())
            for p, start in zip(parameters, starts, strict=True)
        ]
        """The shared weights, in memory order."""
        self._edited = block.tensor(torch.uint8, start=end, num_elements=group.local_size)
        self._rank = group.local_rank
        self._view = block.views[0]
        self._seen = [
            self._view.tensor(p.dtype, start=start, num_elements=p.numel())
            for p, start in zip(parameters, starts, strict=True)
        ]
        self._write(own)
        self._edited[self._rank] = 0
        group.barrier.wait()
        self._attach()

    def like_parameters(self) -> list[Tensor]:
        """The shared weights in the shapes of the parameters."""
        return [
            like_parameter(flat, p) for flat, p in zip(self.flats, self._parameters, strict=True)
        ]

    def _write(self, fragments: Sequence[Fragment]) -> None:
        """Put what the parameters hold into the shared weights, where it is new."""
        for piece in fragments:
            mine = flat_memory(self._parameters[piece.parameter])[piece.start : piece.stop]
            shared = self.flats[piece.parameter][piece.start : piece.stop]
            if not torch.equal(mine, shared):
                shared.copy_(mine)

    def _attach(self) -> None:
        for parameter, seen in zip(self._parameters, self._seen, strict=True):
            if parameter.data_ptr() != seen.data_ptr():
                parameter.data = like_parameter(seen, parameter)
        self._versions = [p._version for p in self._parameters]

    def take_in(self) -> None:
        """Before an update, when no rank reads: apply this rank's edits, if it owns the place.

        A parameter that was given its own memory returns to the block.
        """
        changed = self._versions != [p._version for p in self._parameters]
        moved = any(
            p.data_ptr() != seen.data_ptr()
            for p, seen in zip(self._parameters, self._seen, strict=True)
        )
        # Private pages with the same values would be stale after the update; without any,
        # what this rank sees is what is shared, and there is nothing to compare.
        written = changed or moved or self._view.is_written()
        if written:
            self._write(self._own)
        self._edited[self._rank] = int(written)

    def show(self, used: Sequence[bool]) -> None:
        """After an update and a barrier: see the new weights, and let autograd know."""
        if bool(self._edited.any()):
            self._view.refresh()
            self._attach()
        for parameter, moved in zip(self._parameters, used, strict=True):
            if moved:
                torch.autograd.graph.increment_version(parameter)
        self._versions = [p._version for p in self._parameters]

    def release(self) -> None:
        """Give every parameter memory of its own again."""
        for parameter, seen in zip(self._parameters, self._seen, strict=True):
            if parameter.data_ptr() == seen.data_ptr():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
