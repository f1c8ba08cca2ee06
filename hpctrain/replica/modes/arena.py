"""Gradients through the arena: one message per bucket, on any engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.engines import Op, Pending
from hpctrain.fusion import Arena, Arrived, Watcher, complete
from hpctrain.precision import multiply, sum_of_squares
from hpctrain.replica.control_words import ControlWords
from hpctrain.replica.modes.base import BackwardWatch, Mode
from hpctrain.wire import ENCODABLE

if TYPE_CHECKING:
    from hpctrain.engines import BetweenNodes, Engine

__all__ = ["ArenaMode"]


class ArenaMode(Mode):
    """How a replica's gradients are exchanged when hpctrain lays them out itself."""

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        *,
        bucket_bytes: int | None,
        overlap: bool,
        between: BetweenNodes | None = None,
        num_parts: int = 1,
    ) -> None:
        super().__init__(names, parameters)
        self.engine = engine
        self._between = between
        self.overlap = overlap
        self.arena = Arena(names, parameters, bucket_bytes=bucket_bytes, num_parts=num_parts)
        self._bucket_bytes = bucket_bytes
        self.watch = BackwardWatch(
            self.arena,
            lambda: self.arena.versions(),
            is_intact=lambda: self.arena.is_attached(),
            depart=self._depart if overlap else None,
        )
        self._armed = False
        self._taken = False
        # Where buckets leave during backward, they are laid out once more in its order.
        learns = overlap and engine.size > 1 and len(self.arena.buckets) > 1
        self._watcher = Watcher(parameters) if learns else None
        self._order: list[int] | None = None  # for the arena of the next window

    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass: gradients are views, and zero where a new window begins."""
        if fresh and self._order is not None:
            self._lay_out(self._order)
        if fresh:
            self.arena.zero()
        self.arena.attach()
        if self._watcher is not None:
            self._watcher.forget()

    def _depart(self, control: ControlWords) -> None:
        """Let buckets leave while the backward pass that follows runs."""
        self.arena.arm(self._carry, control, overlap=True)
        self._armed = True

    def take_all(self) -> None:
        """Bring gradients into the arena from any place."""
        if self._order is not None:
            self._lay_out(self._order)
        self.arena.take_all()
        self.watch.forget()
        self._taken = True

    def exchange(self, control: ControlWords) -> Arrived:
        """Collective: sum all gradients over all ranks."""
        if self.stages is not None:
            self.stages.sum_tied()
        if not self._armed:
            self.arena.arm(self._carry, control, overlap=False)
        self._armed = False
        arrived = self.arena.finish()
        if self._taken:  # what this rank has not used gets the others' gradient
            self.arena.attach(keep_frozen=True)
            self._taken = False
        if self._watcher is not None:
            self._agree_on_order(self._watcher)
        return arrived

    def _agree_on_order(self, watcher: Watcher) -> None:
        """Collective, once, after the first exchange: adopt rank 0's order of gradients."""
        self._watcher = None
        order = torch.tensor(complete(watcher.stop(), len(self.arena.parameters)))
        self.engine.broadcast_(order, what="the order of gradients")
        buckets = self.arena.plan(order.tolist(), bucket_bytes=self._bucket_bytes)
        self._order = order.tolist() if buckets != self.arena.buckets else None

    def _lay_out(self, order: list[int]) -> None:
        """Begin an arena in another order, where a window begins."""
        old = self.arena
        old.close()
        self.arena = Arena(old.names, old.parameters, bucket_bytes=self._bucket_bytes, order=order)
        self.arena.num_messages = old.num_messages
        self.arena.num_trigger_calls = old.num_trigger_calls
        self.watch.hooks = self.arena
        self._order = None

    def average(self, divisor: float | Tensor) -> None:
        """Turn the sums into averages."""
        self.arena.divide(divisor)

    def norm_squared(self, excluded: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Sums of squares over the arena, without the excluded parameters, and of these."""
        device = self.arena.parameters[0].device

        def squares(without: frozenset[int], of: frozenset[int]) -> Tensor:
            kept, left = self.arena.runs(without)[0], self.arena.runs(of)[1]
            return torch.stack([sum_of_squares(kept, device), sum_of_squares(left, device)])

        return self._sum_norms(squares, excluded)

    def scale(self, factor: Tensor, excluded: frozenset[int], excluded_factor: Tensor) -> None:
        """Multiply the arena, the excluded parameters by a separate factor."""
        kept, left = self.arena.runs(excluded)
        multiply(kept, factor)
        multiply(left, excluded_factor)

    def clamp(self, limit: float, excluded: frozenset[int]) -> None:
        """Limit each element's size, but for the excluded parameters."""
        for run in self.arena.runs(excluded)[0]:
            run.clamp_(-limit, limit)

    def zero(self) -> bool:
        """Forget all gradients. Collective after an interrupted pass that sent some of them."""
        exchanged = self._armed and self.arena.abandon()
        self._armed = False
        self.arena.zero()
        self.watch.forget()
        return exchanged

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what was chosen."""
        sizes = [
            f"{flat.numel() * flat.element_size() / 2**20:.1f} MiB {dtype} on {device}"
            for (dtype, device), flat in self.arena.flats.items()
        ]
        when = "while backward runs" if self.overlap else "after backward"
        return [
            ("gradients", f"arena: {', '.join(sizes)}"),
            ("messages", f"{len(self.arena.buckets)} a step, sent {when}"),
        ]

    def counts(self) -> dict[str, int]:
        """Messages sent and Python hooks called so far."""
        return {
            "messages": self.arena.num_messages,
            "hooks": self.arena.num_trigger_calls,
            "bytes": sum(self._bytes_of(bucket) for bucket in self.arena.buckets),
        }

    def close(self) -> None:
        """Take the hooks away. Collective over the stages where weights are tied."""
        self.arena.close()
        if self.stages is not None:
            self.stages.close()
        if self._watcher is not None:
            self._watcher.stop()
        if self._between is not None:
            self._between.close()

    def _carry(self, message: Tensor, num_gradients: int, what: str) -> Pending:
        if self._between is not None and num_gradients and message.dtype in ENCODABLE:
            self._between.add_(message[:num_gradients], what)
            message, what = message[num_gradients:], f"{what}: what was used"
        if self.overlap:
            return self.engine.allreduce_async_(message, Op.SUM, what=what)
        self.engine.allreduce_(message, Op.SUM, what=what)
        return Pending(None)
