"""Gradients by reduce-scatter: each rank gets the sum of its slice, and updates that.

What `split(shard="state")` chooses where ranks do not all share a node's memory. A step sends
(n-1)/n of the gradients and (n-1)/n of the new weights, as an allreduce does, and one small message
with the control words and what was used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from hpctrain.engines import Op, Pending
from hpctrain.errors import ConfigError
from hpctrain.fusion import cut_into_runs
from hpctrain.log import format_bytes
from hpctrain.precision import multiply, sum_of_squares
from hpctrain.replica.modes.arena import ArenaMode
from hpctrain.update import SlicedUpdate, slice_of

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.fusion import Arrived
    from hpctrain.replica.control_words import ControlWords

__all__ = ["SlicedMode"]

_ONE_SLICE = "with shard='state' a rank has the average of its own slice alone"


class SlicedMode(ArenaMode):
    """How a replica's gradients are exchanged when each rank needs a slice of them.

    After an exchange `p.grad` has the average in this rank's slice, and zeros elsewhere.

    Args:
        engine: Over the ranks that divide the update.
        names: Of the parameters; the same on every rank.
        parameters: What the user's optimizer updates.
        optimizer: The user's.
        bucket_bytes: When a bucket is closed; None: everything at once.
    """

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        bucket_bytes: int | None,
    ) -> None:
        super().__init__(
            engine,
            names,
            parameters,
            bucket_bytes=bucket_bytes,
            overlap=False,
            num_parts=engine.size,
        )
        double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        self._wide = torch.float64 if double else torch.float32
        self._tails: list[Tensor] = []
        self._num_tails = 0
        self._left: tuple[int, ...] | None = None
        """Versions of the gradients as the exchange has left them; None: there was none."""
        self._slices: tuple[frozenset[int], tuple[list[Tensor], list[Tensor]]] | None = None
        self.update = SlicedUpdate(
            engine,
            optimizer,
            names,
            parameters,
            self.arena.buckets,
            self.arena.flats,
            check=self._check_untouched,
        )

    # Around a backward pass

    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass: gradients are views, and zero where a new window begins."""
        if fresh:
            self._left = None
        super().begin(fresh=fresh)
        self.update.reset_hooks()

    def take_all(self) -> None:
        """Bring gradients into the arena from any place.

        Raises:
            ConfigError: slices of the last exchange are still among them.
        """
        kept = [
            name
            for name, p, view in zip(self.names, self.parameters, self.arena.views, strict=True)
            if p.grad is view
        ]
        if self._left is not None and kept:
            raise ConfigError(
                f"{kept[0]} still has the gradient of the last exchange, and {_ONE_SLICE}, which "
                "cannot be added to; call optimizer.zero_grad() before backward, without "
                "set_to_none=False, and make all but the last backward of a step under "
                "replica.no_sync()"
            )
        self._left = None
        super().take_all()
        self.update.reset_hooks()

    def zero(self) -> bool:
        """Forget all gradients. Collective after an interrupted pass that sent some of them."""
        self._left = None
        return super().zero()

    # Exchange

    def _carry(self, message: Tensor, num_gradients: int, what: str) -> Pending:
        """Collective: this rank's slice becomes the sum, and the rest zero."""
        if num_gradients:
            engine, gradients = self.engine, message[:num_gradients]
            rows = gradients.view(engine.size, -1)
            mine = engine.reduce_scatter(rows, Op.SUM, what=what)
            gradients.zero_()
            rows[engine.rank].copy_(mine.view(-1))
        self._tails.append(message[num_gradients:])
        return Pending(self._sum_tails)

    def _sum_tails(self) -> None:
        """Collective, once an exchange: what all buckets have besides gradients, in one message."""
        tails, self._tails = self._tails, []
        if not tails:
            return
        device = self.engine.device
        sums = torch.cat([tail.to(device, torch.float64) for tail in tails])
        self.engine.allreduce_(sums, Op.SUM, what="weights and use of gradients")
        self._num_tails += 1
        totals = torch.split(sums, [tail.numel() for tail in tails])
        for tail, total in zip(tails, totals, strict=True):
            tail.copy_(total)

    def exchange(self, control: ControlWords) -> Arrived:
        """Collective: each rank gets the sum of its slice over all ranks."""
        self._left = None
        return super().exchange(control)

    def hide_unused(self, used: frozenset[int] | None) -> None:
        """Give parameters that no rank used no gradient at all: None is not zero."""
        super().hide_unused(used)
        self._left = self.arena.versions()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add slices that were set aside."""
        super().add(gradients)
        self._left = self.arena.versions()

    def _check_untouched(self) -> None:
        """Refuse gradients that were changed after the exchange: by a rule for whole ones."""
        home = all(
            p.grad is None or p.grad is view
            for p, view in zip(self.parameters, self.arena.views, strict=True)
        )
        if self._left is None or (home and self._left == self.arena.versions()):
            return
        raise ConfigError(
            f"gradients were changed between backward and step, and {_ONE_SLICE}; use clip_norm= "
            "or clip_value= of distribute to clip, precision='fp16' instead of a GradScaler, or "
            "split without shard="
        )

    def each_alone(self) -> NoReturn:
        """Refused: a rank that has left would not update its slice.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "replica.join() with shard='state': every rank must update its slice; give every rank "
            "the same number of batches (a Loader does), with num_samples=0 for an empty one"
        )

    # Gradients: every rank treats its slices

    def _own_runs(self, excluded: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's slices as few flat pieces: of most parameters, and of the excluded."""
        if self._slices is None or self._slices[0] != excluded:
            found: tuple[list[Tensor], list[Tensor]] = ([], [])
            for bucket in self.arena.buckets:
                flat = self.arena.flats[bucket.dtype, bucket.device]
                start, stop = slice_of(bucket, self.engine.rank, self.engine.size)
                for first, last, is_apart in cut_into_runs(bucket, excluded):
                    if max(first, start) < min(last, stop):
                        found[is_apart].append(flat[max(first, start) : min(last, stop)])
            self._slices = (excluded, found)
        return self._slices[1]

    def average(self, divisor: float | Tensor) -> None:
        """Turn the sums into averages."""
        if isinstance(divisor, Tensor) or divisor != 1.0:
            for run in self._own_runs(frozenset())[0]:
                run.div_(divisor)

    def norm_squared(self, excluded: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Collective: sums of squares over all slices, without the excluded, and of these."""
        device = self.engine.device
        kept, left = (sum_of_squares(runs, device) for runs in self._own_runs(excluded))
        sums = torch.stack([kept.double(), left.double()])  # a rank may have none of some dtype
        self.engine.allreduce_(sums, Op.SUM, what="the norm of sliced gradients")
        kept, left = sums.to(self._wide).unbind()
        return kept, left

    def scale(self, factor: Tensor, excluded: frozenset[int], excluded_factor: Tensor) -> None:
        """Multiply, the excluded parameters by a factor of their own."""
        kept, left = self._own_runs(excluded)
        multiply(kept, factor)
        multiply(left, excluded_factor)

    def clamp(self, limit: float, excluded: frozenset[int]) -> None:
        """Limit each element's size, but for the excluded parameters."""
        for run in self._own_runs(excluded)[0]:
            run.clamp_(-limit, limit)

    # Reports

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what was chosen."""
        num_bytes = sum(flat.numel() * flat.element_size() for flat in self.arena.flats.values())
        scattered = sum(bool(bucket.members) for bucket in self.arena.buckets)
        return [
            ("gradients", f"arena: {format_bytes(num_bytes)} a rank, whole until their sum"),
            (
                "messages",
                f"{scattered} reduce-scatters of gradients, {len(self.update.messages)} allgathers "
                "of weights, and one of a few numbers a step",
            ),
            *self.update.describe(),
        ]

    def counts(self) -> dict[str, int]:
        """Messages so far; bytes of one reduction of all gradients and one gather of all weights.

        Of these (n-1)/n leave a rank, as in an allreduce of the gradients.
        """
        num_scattered = self.arena.num_messages - self._num_empty * self._num_tails
        return {
            "messages": num_scattered + self._num_tails + self.update.num_messages,
            "hooks": self.arena.num_trigger_calls,
            "bytes": 2 * sum(p.numel() * p.element_size() for p in self.parameters),
        }

    @property
    def _num_empty(self) -> int:
        """Buckets without gradients, which are a tail alone."""
        return sum(not bucket.members for bucket in self.arena.buckets)

    def close(self) -> None:
        """Take the hooks away; the optimizer's state stays in pieces."""
        super().close()
        self.update.close()
