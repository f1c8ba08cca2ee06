"""The arena: gradients as views of flat buffers, exchanged one message per bucket.

`p.grad` of every parameter is a view, so nothing is copied into a fusion buffer and nothing has to
be negotiated. A gradient that has left the arena (`zero_grad(set_to_none=True)`,
`create_graph=True`) is moved back before it is sent.

A hook that is a bare `list.append` records which parameters a backward pass used: no Python code
runs during backward, except once per bucket if buckets are sent while backward still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import ConfigError
from hpctrain.fusion.layout import (
    CONTROL_WORDS,
    Bucket,
    cut_into_runs,
    is_dense,
    like_parameter,
    plan,
)
from hpctrain.fusion.usage import Arrived, hook_gradient, specs_of
from hpctrain.pieces import local_tensor, place_like

__all__ = ["Arena", "Carrier", "PendingMessage"]


class PendingMessage(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Block until it has arrived."""


Carrier = Callable[[Tensor, int, str], PendingMessage]
"""Collective: starts summing a flat tensor over all ranks in place. It gets the tensor, how many of
its first elements are gradients, and what it is."""


@dataclass(eq=False, slots=True)
class _BucketBuffer:
    """A bucket and its place in memory."""

    bucket: Bucket
    message: Tensor
    flags: Tensor
    control: Tensor | None
    text: str
    ready: list[Tensor] = field(default_factory=list)
    """Filled by the hooks during one backward pass."""
    used: set[int] = field(default_factory=set)
    """Filled from `ready` after each backward pass, until the exchange."""
    work: PendingMessage | None = None


class Arena:
    """Flat gradient buffers of a list of parameters; of a divided one what this rank holds."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        *,
        bucket_bytes: int | None,
        order: Sequence[int] | None = None,
        num_parts: int = 1,
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self._specs = specs_of(names, parameters)
        self.buckets = plan(
            self._specs, bucket_bytes=bucket_bytes, order=order, num_parts=num_parts
        )
        self._kinds = [(p.dtype, p.device, p.shape) for p in self.parameters]
        self.flats = self._allocate()
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._buffers: list[_BucketBuffer] = []
        self._slot_of: dict[int, tuple[_BucketBuffer, int]] = {}
        self.views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        for bucket in self.buckets:
            self._add_buffer(bucket)
        self._pointers = [_pointer(view) for view in self.views]
        self._hooked: dict[int, RemovableHandle] = {}
        self._triggers: list[RemovableHandle] = []
        self._carry: Carrier | None = None
        self._launched = 0
        self._late: list[str] = []
        self._runs: tuple[frozenset[int], tuple[list[Tensor], list[Tensor]]] | None = None
        self.hook()
        self.num_messages = 0
        """Messages sent so far."""
        self.num_trigger_calls = 0
        """Python hooks called so far."""

    # Building

    def plan(self, order: Sequence[int], *, bucket_bytes: int | None) -> list[Bucket]:
        """The buckets that these parameters would have in another order. Pure."""
        return plan(self._specs, bucket_bytes=bucket_bytes, order=order)

    def _allocate(self) -> dict[tuple[str, str], Tensor]:
        sizes: dict[tuple[str, str], int] = {}
        for bucket in self.buckets:
            sizes[bucket.dtype, bucket.device] = bucket.stop
        return {
            (dtype, device): torch.zeros(size, dtype=getattr(torch, dtype), device=device)
            for (dtype, device), size in sizes.items()
        }

    def _add_buffer(self, bucket: Bucket) -> None:
        flat = self.flats[bucket.dtype, bucket.device]
        control = None
        if bucket.control is not None:
            control = flat[bucket.control : bucket.control + CONTROL_WORDS]
        shown = ", ".join(self.names[i] for i in bucket.members[:3])
        more = f" and {len(bucket.members) - 3} more" if len(bucket.members) > 3 else ""
        buffer = _BucketBuffer(
            bucket=bucket,
            message=flat[bucket.start : bucket.stop],
            flags=flat[bucket.flags : bucket.flags + len(bucket.members)],
            control=control,
            text=f"bucket {len(self._buffers)} ({shown}{more})",
        )
        self._buffers.append(buffer)
        for index, offset in zip(bucket.members, bucket.offsets, strict=True):
            self._slot_of[index] = (buffer, offset)
            self.views[index] = self._view(index)

    def fits(self) -> bool:
        """Whether every parameter still has the size, dtype and device it was laid out for."""
        return all(
            (p.dtype, p.device, p.shape) == kind
            for p, kind in zip(self.parameters, self._kinds, strict=True)
        )

    def close(self) -> None:
        """Take the hooks away; gradients stay what they are."""
        for handle in (*self._hooked.values(), *self._triggers):
            handle.remove()
        self._hooked.clear()
        self._triggers.clear()

    # Around a backward pass

    def attach(self, *, keep_frozen: bool = False) -> None:
        """Make every gradient a view.

        Args:
            keep_frozen: Leave the gradients of frozen parameters as they are: torch steps those
                that `zero_grad(set_to_none=False)` has left. Else they get none.
        """
        for index, parameter in enumerate(self.parameters):
            if not parameter.requires_grad:
                if not keep_frozen:
                    parameter.grad = None
            elif not self._is_home(index):
                self._move_back(index)
        self.hook()

    def hook(self) -> None:
        """Hook what can have a gradient now; what was frozen until now included."""
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad and index not in self._hooked:
                ready = self._slot_of[index][0].ready
                self._hooked[index] = hook_gradient(parameter, ready.append)

    def is_attached(self) -> bool:
        """Whether every gradient is still the arena's own."""
        return all(self._is_home(i) for i, p in enumerate(self.parameters) if p.requires_grad)

    def _is_home(self, index: int) -> bool:
        view = self.views[index]
        return self.parameters[index].grad is view and _pointer(view) == self._pointers[index]

    def _move_back(self, index: int) -> None:
        self.views[index] = self._view(index)
        self.parameters[index].grad = self.views[index]

    def _view(self, index: int) -> Tensor:
        buffer, offset = self._slot_of[index]
        local = local_tensor(self.parameters[index].detach())
        flat = self.flats[buffer.bucket.dtype, buffer.bucket.device]
        piece = flat[offset : offset + local.numel()]
        view = like_parameter(piece, local) if is_dense(local) else piece.view(local.shape)
        return place_like(view, self.parameters[index])

    def collect(self) -> None:
        """After a backward pass: note what it used, and bring back what it wrote elsewhere."""
        for number, buffer in enumerate(self._buffers):
            if number < self._launched:
                self._late += [self.names[self._index[id(p)]] for p in buffer.ready]
            self._collect(buffer)

    def _collect(self, buffer: _BucketBuffer) -> None:
        for parameter in buffer.ready:
            index = self._index[id(parameter)]
            buffer.used.add(index)
            stray = parameter.grad
            if stray is not None and not self._is_home(index):
                self._move_back(index)
                self.views[index].copy_(stray.detach())
        buffer.ready.clear()

    def take_all(self) -> None:
        """Take every gradient from its parameter, regardless of its origin."""
        self.hook()
        self.forget()
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                gradient = parameter.grad
                if gradient is None:
                    self.views[index].zero_()
                    continue
                self._slot_of[index][0].used.add(index)
                if not self._is_home(index):
                    self._move_back(index)
                    strided = gradient.layout is torch.strided
                    self.views[index].copy_(gradient if strided else gradient.to_dense())

    def versions(self) -> tuple[int, ...]:
        """Counters that change with every write to a gradient."""
        return tuple(flat._version for flat in self.flats.values())

    def zero(self) -> None:
        """Forget all gradients, flags and counts."""
        for flat in self.flats.values():
            flat.zero_()
        self.forget()

    def forget(self) -> None:
        """Forget which parameters were used."""
        for buffer in self._buffers:
            buffer.ready.clear()
            buffer.used.clear()

    def uncollected(self) -> list[str]:
        """Parameters that a backward pass used and that were not collected, by name."""
        names = [self.names[self._index[id(p)]] for buffer in self._buffers for p in buffer.ready]
        return list(dict.fromkeys(names))

    # Exchange

    def arm(self, carry: Carrier, control: Sequence[float], *, overlap: bool) -> None:
        """Prepare an exchange; with `overlap`, buckets leave as soon as backward has filled them.

        Args:
            carry: Starts a message.
            control: This rank's control words; see `layout`.
            overlap: Whether backward follows, or is done already.
        """
        self._carry = carry
        self._launched = 0
        self._late = []
        for buffer in self._buffers:
            buffer.work = None
            if buffer.control is not None:
                buffer.control.copy_(torch.tensor(control, dtype=torch.float64), non_blocking=True)
        if overlap and not self._triggers:
            self._set_triggers()

    def _set_triggers(self) -> None:
        for buffer in self._buffers:
            hooked = [i for i in buffer.bucket.members if i in self._hooked]
            if hooked:
                # Slots are in the order of readiness: the last one usually completes the bucket.
                last = self.parameters[hooked[-1]]
                self._triggers.append(hook_gradient(last, self._trigger))

    def _trigger(self, _parameter: Tensor) -> None:
        self.num_trigger_calls += 1
        if self._carry is None:
            return
        while self._launched < len(self._buffers):
            buffer = self._buffers[self._launched]
            expected = sum(self.parameters[i].requires_grad for i in buffer.bucket.members)
            if len({id(p) for p in buffer.ready}) < expected:
                return
            self._launch(buffer)

    def _launch(self, buffer: _BucketBuffer) -> None:
        if self._carry is None:
            raise RuntimeError("an arena must be armed before its buckets are sent")
        self._collect(buffer)
        marks = [1.0 if index in buffer.used else 0.0 for index in buffer.bucket.members]
        buffer.flags.copy_(torch.tensor(marks, dtype=torch.float64), non_blocking=True)
        num_gradients = buffer.bucket.flags - buffer.bucket.start
        buffer.work = self._carry(buffer.message, num_gradients, buffer.text)
        self._launched += 1
        self.num_messages += 1

    def abandon(self) -> bool:
        """Collective if a bucket has left: end an exchange whose backward pass was interrupted.

        The other ranks wait for the buckets that have not left. They are sent, and the last one
        marks them as invalid. Nothing here may be written to while it is being sent.

        Returns:
            Whether a bucket had left.
        """
        has_begun = self._launched > 0
        if has_begun:
            for buffer in self._buffers[self._launched :]:
                if buffer.control is not None:
                    buffer.control[-1] = 1.0
            while self._launched < len(self._buffers):
                self._launch(self._buffers[self._launched])
            for buffer in self._buffers:
                if buffer.work is not None:
                    buffer.work.wait()
                buffer.work = None
        self._carry = None
        self._launched = 0
        self._late = []
        self.forget()
        return has_begun

    def finish(self) -> Arrived:
        """Collective: send the buckets that have not left yet, and wait for all."""
        while self._launched < len(self._buffers):
            self._launch(self._buffers[self._launched])
        late = self._late
        control = torch.zeros(CONTROL_WORDS)
        all_used = True
        for buffer in self._buffers:
            if buffer.work is not None:
                buffer.work.wait()
            buffer.work = None
            unused = set(buffer.bucket.members).difference(buffer.used)
            all_used &= not any(self.parameters[i].requires_grad for i in unused)
            if buffer.control is not None:
                control = buffer.control
        self._carry = None
        self._launched = 0
        self.forget()
        if late:
            raise ConfigError(
                f"{late[0]} got more gradient after its bucket was sent, as with reentrant "
                "activation checkpoints; pass overlap=False to distribute, or use_reentrant=False "
                "to "
                "torch.utils.checkpoint"
            )
        return Arrived(
            control=control.clone(),
            flags=tuple((buffer.bucket.members, buffer.flags.clone()) for buffer in self._buffers),
            all_used_here=all_used,
        )

    def runs(self, apart: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients as few long flat pieces: of most parameters, and of those set apart."""
        if self._runs is None or self._runs[0] != apart:
            found: tuple[list[Tensor], list[Tensor]] = ([], [])
            for bucket in self.buckets:
                flat = self.flats[bucket.dtype, bucket.device]
                for start, stop, is_apart in cut_into_runs(bucket, apart):
                    found[is_apart].append(flat[start:stop])
            self._runs = (apart, found)
        return self._runs[1]

    def divide(self, divisor: float | Tensor) -> None:
        """Turn sums into averages."""
        if isinstance(divisor, Tensor) or divisor != 1.0:
            for flat in self.flats.values():
                flat.div_(divisor)


def _pointer(view: Tensor) -> int:
    return local_tensor(view).data_ptr()
