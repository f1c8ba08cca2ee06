"""The sliced update: each rank updates its slice of every bucket, and all gather the new weights.

Weights are whole on every rank, and so are gradients until their sum; the optimizer's state is 1/n
of it a rank. What a rank updates is a run of consecutive elements of each parameter, often none. So
every rank knows each parameter's step count and which state there is, without asking the others.

The user's `optimizer.state` has a `Piece` for what is divided: this rank's run, and where it lies.
A checkpoint writes these as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.fusion import Bucket, members_between
from hpctrain.log import format_bytes
from hpctrain.pieces import Piece, Region
from hpctrain.update.divided import DividedUpdate
from hpctrain.update.pieces import (
    ParameterPiece,
    flat_memory,
    make_inner,
    make_pieces,
    take_options,
    without_global_hooks,
)
from hpctrain.update.sharing import Fragment, refuse_fused_complex

if TYPE_CHECKING:
    from hpctrain.engines import Engine

__all__ = ["SlicedUpdate", "WeightMessage", "has_sliced_state", "plan_messages", "slice_of"]

_MESSAGE_BYTES = 25 << 20
"""New weights travel in messages of at most this size, which is what a rank holds besides."""
_COUNTS = frozenset({"step", "mu_product", "eta", "mu"})
"""State of torch's optimizers that is one number, also where the parameter is."""

_Part = tuple[int, int, int, int]
"""A parameter, the first of its elements and the one after the last, and their place."""


def slice_of(bucket: Bucket, rank: int, num_ranks: int) -> tuple[int, int]:
    """Where a rank's slice of a bucket's gradients begins and ends in the flat buffer. Pure."""
    length = (bucket.flags - bucket.start) // num_ranks
    start = bucket.start + rank * length
    return start, start + length


@dataclass(frozen=True, slots=True)
class WeightMessage:
    """New weights that are gathered at once."""

    dtype: torch.dtype
    device: str
    length: int
    """Elements of each rank's part."""
    parts: tuple[tuple[_Part, ...], ...]
    """By rank: what of which parameters, and where in the rank's part."""

    @property
    def members(self) -> frozenset[int]:
        """The parameters that it has something of."""
        return frozenset(one[0] for part in self.parts for one in part)


def plan_messages(
    buckets: Sequence[Bucket],
    sizes: Sequence[int],
    num_ranks: int,
    *,
    message_bytes: int = _MESSAGE_BYTES,
) -> list[WeightMessage]:
    """Cut the weights of all buckets into messages. Pure.

    Args:
        buckets: With gradients that can be cut into `num_ranks` equal slices.
        sizes: Elements of each parameter.
        num_ranks: The ranks.
        message_bytes: The most bytes of all ranks' parts together.
    """
    messages = []
    for bucket in buckets:
        dtype: torch.dtype = getattr(torch, bucket.dtype)
        starts = [slice_of(bucket, rank, num_ranks) for rank in range(num_ranks)]
        length = starts[0][1] - starts[0][0]
        most = max(1, message_bytes // (num_ranks * dtype.itemsize))
        for first in range(0, length, most):
            last = min(length, first + most)
            parts = tuple(
                tuple(members_between(bucket, sizes, start + first, start + last))
                for start, _ in starts
            )
            messages.append(WeightMessage(dtype, bucket.device, last - first, parts))
    return [one for one in messages if one.members]


class SlicedUpdate(DividedUpdate):
    """Takes over `optimizer.step()` until it is closed; afterwards the state stays in pieces.

    Args:
        engine: Over the ranks that divide the update.
        optimizer: The user's; it treats every element alone.
        names: Of its parameters, in the order of its groups.
        parameters: Contiguous, in the same order.
        buckets: How gradients lie in the flat buffers.
        flats: These buffers, by dtype and device.
        check: Refuses gradients that are not what the exchange has left.
    """

    undivided = "split without shard="

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        buckets: Sequence[Bucket],
        flats: Mapping[tuple[str, str], Tensor],
        *,
        check: Callable[[], None],
    ) -> None:
        super().__init__(optimizer, names, parameters)
        self._engine = engine
        self._check_gradients = check
        self._has_complex = any(p.is_complex() for p in parameters)
        sizes = [p.numel() for p in parameters]
        self.fragments = [Fragment(index, 0, 0) for index in range(len(sizes))]
        self._gradients = [p.detach().new_empty(0) for p in parameters]
        for bucket in buckets:
            start, stop = slice_of(bucket, engine.rank, engine.size)
            flat = flats[bucket.dtype, bucket.device]
            for index, first, last, at in members_between(bucket, sizes, start, stop):
                self.fragments[index] = Fragment(index, first, last)
                self._gradients[index] = flat[start + at : start + at + last - first]
        self.messages = plan_messages(buckets, sizes, engine.size)
        self.num_messages = 0
        """Messages of weights so far."""
        self._imports = True
        self._shown: dict[int, dict[str, Any]] = {}
        self._build()
        self.take_over()

    def _build(self) -> None:
        """Cut the parameters where they lie now."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if not parameter.is_contiguous():
                raise ConfigError(
                    f"{name} is not contiguous in memory, and shard='state' cuts parameters into "
                    "runs of elements; make it contiguous, or split without shard="
                )
        self._places = [p.data_ptr() for p in self._parameters]
        self._weights = [flat_memory(p) for p in self._parameters]
        self.pieces = make_pieces(self.fragments, self._parameters, whole=False)
        self.inner = make_inner(self._optimizer, self.pieces)
        self._routes: tuple[tuple[bool, ...], list[_Route]] | None = None

    def _forget_state(self) -> None:
        self._imports = True

    # The update

    @torch.no_grad()
    def _step(self) -> None:
        """Collective: one update of all parameters that have a gradient."""
        self._check_gradients()
        if self._places != [p.data_ptr() for p in self._parameters]:
            before = [self.inner.state.get(piece.tensor) for piece in self.pieces]
            self._build()
            for piece, state in zip(self.pieces, before, strict=True):
                if state is not None:
                    self.inner.state[piece.tensor] = state
        take_options(self.inner, self._optimizer)
        if self._has_complex:
            refuse_fused_complex(self._optimizer, self._names)
        if self._imports or not self._is_as_shown():
            self._take_in()
        used = tuple(p.grad is not None for p in self._parameters)
        for piece, gradient, is_used in zip(self.pieces, self._gradients, used, strict=True):
            piece.tensor.grad = gradient if is_used else None
        with without_global_hooks():
            self.inner.step()
        if self._routes is None or self._routes[0] != used:
            self._routes = (used, [self._route(one, used) for one in self.messages])
        for number, route in enumerate(self._routes[1]):
            if route.is_needed:
                self._gather(number, route)
        self._show()

    def _route(self, message: WeightMessage, used: Sequence[bool]) -> _Route:
        """Which weights go where, without those that have not moved."""
        own, rank = message.parts[self._engine.rank], self._engine.rank
        return _Route(
            is_needed=any(used[index] for index in message.members),
            sent=[(at, self._weights[i][a:b]) for i, a, b, at in own if used[i]],
            received=[
                (peer * message.length + at, self._weights[i][a:b])
                for peer, part in enumerate(message.parts)
                for i, a, b, at in part
                if peer != rank and used[i]
            ],
        )

    def _gather(self, number: int, route: _Route) -> None:
        message, engine = self.messages[number], self._engine
        own = torch.zeros(message.length, dtype=message.dtype, device=message.device)
        if route.sent:
            torch._foreach_copy_(
                [own[at : at + part.numel()] for at, part in route.sent],
                [part for _, part in route.sent],
            )
        everyone = own.new_empty(message.length * engine.size)
        engine.allgather_into(everyone, own, what=f"new weights {number}")
        if route.received:
            torch._foreach_copy_(
                [part for _, part in route.received],
                [everyone[at : at + part.numel()] for at, part in route.received],
            )
        self.num_messages += 1

    # The state

    def _is_as_shown(self) -> bool:
        """Whether the user's optimizer has the very entries that were put there."""
        state = self._optimizer.state
        for index, parameter in enumerate(self._parameters):
            own, shown = state.get(parameter) or {}, self._shown.get(index, {})
            if own.keys() != shown.keys() or not all(map(is_, own.values(), shown.values())):
                return False
        return True

    def _take_in(self) -> None:
        """Take this rank's part of the state that the user's optimizer has."""
        self._imports = False
        self.inner.state.clear()
        self._shown.clear()
        for piece, parameter in zip(self.pieces, self._parameters, strict=True):
            for key, value in (self._optimizer.state.get(parameter) or {}).items():
                self.inner.state[piece.tensor][key] = self._own_part(piece, key, value)

    def _own_part(self, piece: ParameterPiece, key: str, value: Any) -> Any:
        index, start, stop = piece.fragment.parameter, piece.fragment.start, piece.fragment.stop
        parameter = self._parameters[index]
        part: Tensor | None = None
        if isinstance(value, Piece):
            if tuple(value.shape) == tuple(parameter.shape) and _run_of(value) == (start, stop):
                part = value.tensor.reshape(-1)
        elif not isinstance(value, Tensor):
            return value
        elif key in _COUNTS or value.shape != parameter.shape:
            return value.detach().clone()
        elif not hasattr(value, "to_local"):
            part = value.detach().reshape(-1)[start:stop].clone()
        if part is None:
            raise ConfigError(
                f"the optimizer's state {key} of {self._names[index]} is a part of a tensor, and "
                f"not the elements {start} to {stop} that this rank updates; load whole tensors, "
                "or a checkpoint by a Saver"
            )
        return part.to(parameter.device, parameter.dtype if part.is_floating_point() else None)

    def _show(self) -> None:
        """Put this rank's state where the user's optimizer has it."""
        for index, piece in enumerate(self.pieces):
            state = self.inner.state.get(piece.tensor)
            shown = self._shown.get(index)
            if not state or (shown is not None and _shows(shown, state)):
                continue
            parameter, start = self._parameters[index], piece.fragment.start
            self._shown[index] = {
                key: Piece(value, start, tuple(parameter.shape))
                if isinstance(value, Tensor) and _is_divided(key, value, piece)
                else value
                for key, value in state.items()
            }
            self._optimizer.state[parameter] = dict(self._shown[index])

    def wanted(self, place: str, shape: tuple[int, ...]) -> range | None:
        """Which elements of a saved tensor of the state this rank wants; None: all of it.

        Args:
            place: In the optimizer's state, such as `state/0/exp_avg`.
            shape: Of the whole tensor.
        """
        first, _, rest = place.partition("/")
        number, _, key = rest.partition("/")
        if first != "state" or not number.isdecimal() or int(number) >= len(self._parameters):
            return None
        index = int(number)
        if key in _COUNTS or tuple(shape) != tuple(self._parameters[index].shape):
            return None
        return range(self.fragments[index].start, self.fragments[index].stop)

    @property
    def num_bytes(self) -> int:
        """Of the state that this rank holds."""
        return sum(
            value.numel() * value.element_size()
            for state in self.inner.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )

    def describe(self) -> list[tuple[str, str]]:
        """What was chosen, in words; the same on every rank."""
        total = sum(weights.numel() for weights in self._weights)
        most = -(-total // self._engine.size)
        kind = f"about {format_bytes(self.num_bytes)} a rank" if self.num_bytes else "none yet"
        return [
            (
                "update",
                f"each rank a slice of all parameters, about {most:,} of {total:,} elements",
            ),
            ("state", f"1/{self._engine.size} of it a rank: {kind}"),
        ]


@dataclass(frozen=True, slots=True)
class _Route:
    """What a message of weights carries in one step."""

    is_needed: bool
    sent: list[tuple[int, Tensor]]
    received: list[tuple[int, Tensor]]


def _run_of(piece: Piece) -> tuple[int, int] | None:
    """Which elements of the whole a piece has, counted flat; None: they are not consecutive."""
    if not piece.tensor.numel():
        return (0, 0)
    if isinstance(piece.offset, int):
        return piece.offset, piece.offset + piece.tensor.numel()
    region = Region(tuple(piece.offset), tuple(piece.tensor.shape))
    run = region.run_in(Region.whole(piece.shape))
    return None if run is None else (run.start, run.stop)


def _is_divided(key: str, value: Tensor, piece: ParameterPiece) -> bool:
    """Whether a state tensor has an element for each element of the piece."""
    return key not in _COUNTS and value.shape == piece.tensor.shape


def _shows(shown: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether what is shown is still what there is."""
    return shown.keys() == state.keys() and all(
        (one.tensor if isinstance(one, Piece) else one) is state[key] for key, one in shown.items()
    )


def has_sliced_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's state is that of slices, after the update over them was closed."""
    return any(
        isinstance(value, Piece) for state in optimizer.state.values() for value in state.values()
    )
