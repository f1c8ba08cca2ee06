"""Gradients through the memory that the ranks of a node share; see `node_memory`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.fusion.arena import Arrived
from hpctrain.fusion.layout import plan
from hpctrain.fusion.usage import Usage, specs_of
from hpctrain.replica.arena_mode import Control
from hpctrain.replica.node_memory import NodeMemory, Room
from hpctrain.world.shared_memory import describe_bytes

if TYPE_CHECKING:
    from hpctrain.engines.base import Engine
    from hpctrain.engines.node import NodeGroup
    from hpctrain.update.sharded import ShardedUpdate

__all__ = ["NodeMode"]


class NodeMode:
    """How a replica's gradients travel inside a node, and slice by slice between nodes.

    Backward leaves gradients where torch puts them; one pass copies them into the rank's part, and
    after the exchange every `p.grad` is a view of the sum.
    """

    def __init__(
        self,
        engine: Engine,
        group: NodeGroup,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self.engine = engine
        self.group = group
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self._kinds = [(p.dtype, p.device, p.shape) for p in self.parameters]
        buckets = plan(specs_of(names, parameters), bucket_bytes=None)
        self.memory = NodeMemory(group, buckets, self.parameters)
        self.usage = Usage(self.names, self.parameters)
        self.update: ShardedUpdate | None = None
        self.why_update = ""
        self.views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        self._slots: list[Tensor] = list(self.views)
        for room in self.memory.rooms:
            for index, slot, view in zip(room.bucket.members, room.slots, room.views, strict=True):
                self._slots[index], self.views[index] = slot, view
        self._clean: set[int] = set(range(len(self.parameters)))
        """Parameters whose place in this rank's part is zero."""
        self._tails: list[tuple[float, ...]] = [()] * len(self.memory.rooms)
        self._seen = self._versions()
        self._strays: list[tuple[int, int]] | None = None
        self._closing = False
        self._num_exchanges = 0

    def fits(self) -> bool:
        """Whether the parameters are still what they were laid out as."""
        return all(
            (p.dtype, p.device, p.shape) == kind
            for p, kind in zip(self.parameters, self._kinds, strict=True)
        )

    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass: where a new window begins, there are no gradients."""
        if fresh:
            self.zero()
            for parameter in self.parameters:
                parameter.grad = None
            if self._versions() != self._seen:  # this rank has written to gradients: see the sum
                for room in self.memory.rooms:
                    room.own.refresh()
                self._seen = self._versions()
        self.usage.hook()

    def edited(self) -> bool:
        """Whether somebody has written to gradients since `settle`."""
        return self._strays is not None and self._strays != self._fingerprint()

    def foreign(self) -> list[str]:
        """Parameters that a backward pass of somebody else's has written to."""
        return self.usage.unsettled()

    def arm(self, control: Control) -> None:
        """Before the last backward pass of a window."""
        self._closing = True

    def settle(self) -> None:
        """After a backward pass."""
        self.usage.settle()
        self._strays = None if self._closing else self._fingerprint()
        self._closing = False

    def exchange(self, control: Control) -> Arrived:
        """Collective: sum all gradients over all ranks."""
        used = {i for i in self.usage.used if self.parameters[i].grad is not None}
        self._write_gradients(used)
        for number, room in enumerate(self.memory.rooms):
            self._write_tail(number, room, used, control)
        self.engine.meet(self._reduce, "exchange of gradients", "", None)
        self._num_exchanges += 1
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.requires_grad:
                parameter.grad = view
        totals = [room.control() for room in self.memory.rooms]
        arrived = Arrived(
            control=next(total for total in totals if total is not None),
            flags=tuple((room.bucket.members, room.flags()) for room in self.memory.rooms),
            all_used_here=len(used) == len(self.parameters),
        )
        self._strays = None
        self.usage.forget()
        return arrived

    def _write_gradients(self, used: set[int]) -> None:
        """Copy this rank's gradients into its part, and zero what it has none for."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for index in used:
            gradient = self.parameters[index].grad
            if gradient is not None:
                dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                sources.append(dense.detach())
                targets.append(self._slots[index])
        absent = [i for i in range(len(self.parameters)) if i not in used and i not in self._clean]
        with torch.no_grad():
            if targets:
                torch._foreach_copy_(targets, sources)
            if absent:
                torch._foreach_zero_([self._slots[index] for index in absent])
        self._clean.update(absent)
        self._clean.difference_update(used)

    def _write_tail(self, number: int, room: Room, used: set[int], control: Control) -> None:
        """Write flags and control words, unless they are those of the last time."""
        tail = tuple(1.0 if index in used else 0.0 for index in room.bucket.members)
        if room.bucket.control is not None:
            tail += control
        if tail != self._tails[number]:
            self._tails[number] = tail
            part = room.parts[self.group.local_rank]
            part[room.tail].copy_(torch.tensor(tail, dtype=torch.float64))

    def _reduce(self) -> None:
        for room in self.memory.rooms:
            self.group.reduce(room.parts, room.total)

    def average(self, divisor: float | Tensor) -> None:
        """Collective unless the divisor is 1: turn the sums into averages."""
        if divisor == 1.0:
            return
        for room in self.memory.rooms:
            # Not the tail: another rank may still be reading what to divide by.
            own = self.group.own_slice(room.bucket.flags)
            room.total[own].div_(divisor)
        self.engine.meet(self.group.barrier.wait, "average of gradients", "", None)

    def zero(self) -> None:
        """Forget all gradients."""
        self.usage.forget()
        self._strays = None

    def hide_unused(self, used: frozenset[int] | None) -> None:
        """Give parameters that no rank used no gradient at all: None is not zero."""
        if used is not None:
            for index, parameter in enumerate(self.parameters):
                if index not in used:
                    parameter.grad = None

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
        """A block in which every rank that steps updates everything by itself."""
        return nullcontext() if self.update is None else self.update.suspended()

    def describe(self) -> list[tuple[str, str]]:
        """What was chosen, in words."""
        sizes = [
            f"{describe_bytes(room.total.numel() * room.total.element_size())} {room.bucket.dtype}"
            for room in self.memory.rooms
        ]
        block = self.memory.block
        rows = [
            ("gradients", f"shared memory: {', '.join(sizes)} a rank, and once more for their sum"),
            ("memory", f"{describe_bytes(block.num_bytes)} a node, {block.backing.why}"),
            ("waiting", self.group.barrier.how),
        ]
        if self.group.num_nodes > 1:
            rows.append(("between nodes", f"{self.group.num_lanes} slices at once"))
        if self.update is None:
            return [*rows, ("update", f"replicated: {self.why_update}")]
        return [*rows, *self.update.describe(), ("", self.why_update)]

    def counts(self) -> dict[str, int]:
        """Exchanges so far and Python hooks called so far, and bytes in one exchange."""
        item = [room.total.numel() * room.total.element_size() for room in self.memory.rooms]
        return {"messages": self._num_exchanges, "hooks": 0, "bytes": sum(item)}

    def close(self) -> None:
        """Take the hooks away; gradients stay what they are."""
        self.usage.close()
        if self.update is not None:
            self.update.close()
        self.memory.close()

    def _versions(self) -> tuple[int, ...]:
        return tuple(room.seen._version for room in self.memory.rooms)

    def _fingerprint(self) -> list[tuple[int, int]]:
        return [(id(g), -1 if g is None else g._version) for g in (p.grad for p in self.parameters)]
