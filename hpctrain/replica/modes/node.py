"""Gradients through the memory that the ranks of a node share; see `node_memory`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.fusion import Arrived, Usage, plan, specs_of
from hpctrain.log import format_bytes
from hpctrain.replica.control_words import ControlWords
from hpctrain.replica.modes.base import TorchGradientsMode
from hpctrain.replica.modes.node_memory import NodeMemory, NodeNorms, NodeSums
from hpctrain.update import some_names

if TYPE_CHECKING:
    from hpctrain.engines import Engine, NodeGroup
    from hpctrain.update import ShardedUpdate
    from hpctrain.wire import Wire

__all__ = ["NodeMode"]

_TAKE_FROM_BYTES = 16 << 20
"""From this size on gradients are moved one by one during backward, each while it is in the cache;
smaller ones are all still there afterwards, and one pass is faster (5 and 21 MB in
`benchmarks.step_overhead`).
"""


class NodeMode(TorchGradientsMode):
    """How a replica's gradients are exchanged inside a node, and slice by slice between nodes.

    Backward leaves gradients where torch puts them; one pass copies them into the rank's part, save
    those that this rank alone adds up, and after the exchange every `p.grad` is a view of the sum.
    """

    def __init__(
        self,
        engine: Engine,
        group: NodeGroup,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        *,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(names, parameters)
        self.engine = engine
        self.group = group
        self._strides = [p.stride() for p in self.parameters]
        buckets = plan(specs_of(names, parameters), bucket_bytes=None)
        self.memory = NodeMemory(group, buckets, self.parameters)
        self.norms = NodeNorms(engine, group, self.memory.buffers)
        total = sum(p.numel() * p.element_size() for p in self.parameters)
        take = self._take if total >= _TAKE_FROM_BYTES else None
        self.sums = NodeSums(group, self.memory.buffers, wire)
        self._watch(Usage(self.names, self.parameters, take))
        self.updates: list[ShardedUpdate] = []
        self.why_update = ""
        self.views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        self._slots: list[Tensor] = list(self.views)
        for buffer in self.memory.buffers:
            for index, slot, view in zip(
                buffer.bucket.members, buffer.slots, buffer.views, strict=True
            ):
                self._slots[index], self.views[index] = slot, view
        self._written: set[int] = set()
        """Parameters whose slot in this rank's part is not zero."""
        self._told: frozenset[int] | None = None
        """The flags in this rank's part."""
        self._copies = False
        """Whether this rank writes to gradients: it then has private pages of them."""
        self._text = f"exchange of gradients ({some_names(self.names)})"
        self._num_exchanges = 0

    def fits(self) -> bool:
        """Whether the parameters are still what they were laid out as."""
        return super().fits() and self._strides == [p.stride() for p in self.parameters]

    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass: at the start of a window there are no gradients."""
        super().begin(fresh=fresh)
        for update in self.updates:
            update.reset_hooks()

    def take_all(self) -> None:
        """Gradients are where torch has put them: an exchange takes them from there."""
        super().take_all()
        for update in self.updates:
            update.reset_hooks()

    def exchange(self, control: ControlWords) -> Arrived:
        """Collective: sum all gradients over all ranks."""
        gradients = [p.grad for p in self.parameters]
        used = frozenset(i for i, gradient in enumerate(gradients) if gradient is not None)
        # A view of the last sum that was added to lies where the new one goes.
        apart = [
            None if gradient is view else gradient
            for gradient, view in zip(gradients, self.views, strict=True)
        ]
        direct = self.sums.direct(apart)
        self._write_gradients(gradients, used, direct.keys())
        self._write_words(used, control)
        self.engine.meet(lambda: self.sums.reduce(direct), self._text, "", None)
        self._num_exchanges += 1
        self._copies = self._copies or any(
            buffer.own.is_written() for buffer in self.memory.buffers
        )
        self._look()
        # Frozen meanwhile or not: `hide_unused` removes what no rank used.
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        self.watch.forget()
        totals = [buffer.control() for buffer in self.memory.buffers]
        return Arrived(
            control=next(total for total in totals if total is not None),
            flags=tuple((buffer.bucket.members, buffer.flags()) for buffer in self.memory.buffers),
            all_used_here=len(used) == len(self.parameters),
        )

    def _take(self, index: int) -> None:
        """Move a gradient into this rank's part while it is still in the cache.

        Its memory is free again for the next one: a pass needs no second copy of all gradients.
        What this rank alone adds up stays where it is; a gradient with a graph behind it stays
        until the exchange, and sparse ones do.
        """
        if index in self.sums.members:
            return
        parameter, slot = self.parameters[index], self._slots[index]
        gradient = parameter.grad
        if gradient is None or gradient is slot:
            return
        if not gradient.requires_grad and gradient.layout is torch.strided:
            self._written.add(index)
            slot.copy_(gradient)
            parameter.grad = slot

    def _write_gradients(
        self, gradients: list[Tensor | None], used: frozenset[int], direct: AbstractSet[int]
    ) -> None:
        """Copy what is not in this rank's part yet, and zero what it has no gradient for.

        What is `direct` is added from where it is; its place here may hold an old gradient.
        """
        strays = [
            (slot, _dense(gradient))
            for index, (gradient, slot) in enumerate(zip(gradients, self._slots, strict=True))
            if gradient is not None and gradient is not slot and index not in direct
        ]
        absent = self._written - used
        with torch.no_grad():
            if strays:
                targets, sources = zip(*strays, strict=True)
                torch._foreach_copy_(targets, sources)
            if absent:
                torch._foreach_zero_([self._slots[index] for index in absent])
        self._written = (self._written & direct) | (used - direct)

    def _write_words(self, used: frozenset[int], control: ControlWords) -> None:
        """Write control words, and the flags where they have changed."""
        for buffer in self.memory.buffers:
            part = buffer.parts[self.group.local_rank]
            if used != self._told:
                flags = [1.0 if index in used else 0.0 for index in buffer.bucket.members]
                start = buffer.bucket.flags
                part[start : start + len(flags)].copy_(torch.tensor(flags, dtype=torch.float64))
            if buffer.bucket.control is not None:
                words = torch.tensor(control, dtype=torch.float64)
                part[buffer.bucket.control : buffer.bucket.stop].copy_(words)
        self._told = used

    def average(self, divisor: float | Tensor) -> None:
        """Collective unless the divisor is 1: turn the sums into averages."""
        if divisor == 1.0:
            return
        for buffer in self.memory.buffers:
            # Not the tail: another rank may still be reading what to divide by.
            own = self.group.own_slice(buffer.bucket.flags)
            buffer.total[own].div_(divisor)
        self.engine.meet(self.group.barrier.wait, "average of gradients", "", None)
        self._look()

    def _look(self) -> None:
        """See the sum where this rank has pages of its own.

        Who clips once clips at every step: a copy costs less than taking the pages back and
        having each of them copied again by the kernel at the first write.
        """
        if self._copies:
            for buffer in self.memory.buffers:
                buffer.seen.copy_(buffer.total[: buffer.bucket.flags])

    def norm_squared(self, excluded: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Collective: sums of squares without the excluded parameters, and of these."""
        return self.norms.norm_squared(excluded)

    def scale(self, factor: Tensor, excluded: frozenset[int], excluded_factor: Tensor) -> None:
        """Collective: multiply, the excluded parameters by a separate factor."""
        self.norms.scale(factor, excluded, excluded_factor)
        self._look()

    def clamp(self, limit: float, excluded: frozenset[int]) -> None:
        """Collective: limit each element's size, but for the excluded parameters."""
        self.norms.clamp(limit, excluded)
        self._look()

    @contextmanager
    def each_alone(self) -> Iterator[None]:
        """A block in which every rank that steps updates everything by itself."""
        with ExitStack() as stack:
            for update in self.updates:
                stack.enter_context(update.suspended())
            yield

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what was chosen."""
        sizes = [
            f"{format_bytes(buffer.num_bytes)} {buffer.bucket.dtype}"
            for buffer in self.memory.buffers
        ]
        block, where = self.memory.block, self.group.share_name
        rows = [
            ("gradients", f"shared memory: {', '.join(sizes)} a rank, and once more for their sum"),
            ("memory", f"{format_bytes(block.num_bytes)} a {where}, {block.backing.why}"),
            ("exchanges", "1 a step, after backward"),
            ("waiting", self.group.barrier.how),
        ]
        if self.group.num_nodes > 1:
            rows.append((f"between {where}s", f"{self.group.num_slices} slices at once"))
        if not self.updates:
            return [*rows, ("update", f"replicated: {self.why_update}")]
        shares = [row for update in self.updates for row in update.describe()]
        return [*rows, *shares, ("", self.why_update)]

    def counts(self) -> dict[str, int]:
        """Exchanges so far and Python hooks called so far, and bytes in one exchange."""
        num_bytes = sum(self._bytes_of(buffer.bucket) for buffer in self.memory.buffers)
        return {"messages": self._num_exchanges, "hooks": self.usage.num_taken, "bytes": num_bytes}

    def close(self) -> None:
        """Take the hooks away; gradients stay what they are."""
        self.usage.close()
        for update in self.updates:
            update.close()
        self.norms.close()
        self.memory.close()


def _dense(gradient: Tensor) -> Tensor:
    """What can be copied: no graph behind it, and no empty rows left out."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
