"""A step's event graph, replayed on the clock of its slowest rank. Pure.

Backward makes gradients one after the other; they fill pieces; a piece leaves when it is full (or
at the next cycle) and when the one before it has arrived; the update waits for the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from hpctrain.predict.exchange import Exchange
from hpctrain.predict.profile import Layer

__all__ = ["Message", "Timeline", "form_pieces", "replay"]


@dataclass(frozen=True, slots=True)
class Message:
    """A piece of the gradients on its way."""

    num_bytes: int
    ready_s: float
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When what happened, in seconds since backward began."""

    backward_s: float
    messages: tuple[Message, ...]

    @property
    def stop_s(self) -> float:
        """When the last gradient is there."""
        return max([self.backward_s, *(message.stop_s for message in self.messages)])

    @property
    def exposed_s(self) -> float:
        """Communication that backward does not hide."""
        return self.stop_s - self.backward_s

    @property
    def sending_s(self) -> float:
        """All communication, hidden or not."""
        return sum(message.stop_s - message.start_s for message in self.messages)


def form_pieces(
    layers: Sequence[Layer], exchange: Exchange, *, slow: float = 1.0, num_ranks: int = 1
) -> list[tuple[float, int]]:
    """When each piece can leave, and its bytes, in the order in which they do.

    Args:
        layers: In the order of backward.
        exchange: How gradients are gathered into pieces.
        slow: By how much backward takes longer than the layers say.
        num_ranks: How many have to agree, where that takes time.
    """
    clock = 0.0
    ready = []
    for layer in layers:
        clock += slow * layer.backward_s
        if layer.gradient_bytes:
            ready.append((clock, layer.gradient_bytes))
    if not ready:
        return []
    if not exchange.overlap:
        ready = [(clock, size) for _, size in ready]
    cycle = exchange.cycle_of(num_ranks)
    if cycle > 0:
        # Not the cycle of the very moment: agreeing takes until the next one.
        ready = [((ceil(when / cycle - 1e-9)) * cycle, size) for when, size in ready]
    return _fuse(ready, exchange.bucket_bytes, apart=cycle > 0)


def _fuse(
    ready: list[tuple[float, int]], limit: int | None, *, apart: bool
) -> list[tuple[float, int]]:
    """Gather neighbours. `apart`: only those of one cycle, and never beyond the limit."""
    pieces: list[tuple[float, int]] = []
    filled, since = 0, 0.0
    for when, size in ready:
        full = limit is not None and (filled + size > limit if apart else filled >= limit)
        if filled and (full or (apart and when > since)):
            pieces.append((since, filled))
            filled = 0
        filled, since = filled + size, when
    return [*pieces, (since, filled)]


def replay(
    layers: Sequence[Layer],
    exchange: Exchange,
    cost_s: Callable[[float], float],
    *,
    slow: float = 1.0,
    num_ranks: int = 1,
) -> Timeline:
    """Replay backward and exchange of one step.

    Args:
        layers: In the order of backward.
        exchange: How gradients travel.
        cost_s: Seconds of a collective of so many bytes.
        slow: By how much backward takes longer than the layers say.
        num_ranks: How many have to agree, where that takes time.
    """
    free_s = 0.0
    messages = []
    for ready_s, size in form_pieces(layers, exchange, slow=slow, num_ranks=num_ranks):
        start_s = max(ready_s, free_s)
        free_s = start_s + cost_s(size * exchange.wire_ratio)
        messages.append(Message(size, ready_s, start_s, free_s))
    backward_s = slow * sum(layer.backward_s for layer in layers)
    return Timeline(backward_s, tuple(messages))
