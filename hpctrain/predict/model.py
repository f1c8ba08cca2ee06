"""A step at N ranks: its event graph, replayed on the clock of the slowest rank. Pure; simulated.

Backward makes gradients one after the other; they fill pieces; a piece leaves when it is full (or
at the next cycle) and when the one before it has arrived; the update waits for the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil, sqrt

from hpctrain.predict.costs import RankLayout, allreduce_s, encoded_allreduce_s, slowest_of
from hpctrain.predict.exchange import Exchange, default_exchange
from hpctrain.predict.machine import Costs, Link, Machine
from hpctrain.predict.profile import Layer, Profile
from hpctrain.wire import BITS, NONE

__all__ = [
    "Message",
    "Prediction",
    "Range",
    "Timeline",
    "form_pieces",
    "predict",
    "replay",
    "simulate",
]


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
    """Merge adjacent ones. `apart`: only those of one cycle, and never beyond the limit."""
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
        exchange: How gradients are sent.
        cost_s: Seconds of a collective of this many bytes.
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


@dataclass(frozen=True, slots=True)
class Range:
    """A value, and where it lies with one standard deviation of the inputs."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the replay says of one number of ranks. Simulated, whatever the inputs."""

    num_ranks: int
    num_nodes: int
    batch: int
    """Samples per rank and backward pass."""
    global_batch: int
    step_s: Range
    efficiency: Range
    """Samples per second and rank, relative to a single rank without communication."""
    is_strong: bool
    """That the single rank has the whole global batch, not a share of it."""
    exposed_s: Range
    input_s: float
    compute_s: float
    """Forward and backward of a rank alone."""
    contention_s: float
    """Slowdown by the node's other ranks."""
    straggling_s: float
    """What waiting for the slowest rank adds."""
    update_s: float
    sending_s: float
    """All communication, hidden or not."""
    num_messages: int
    samples_per_s: float
    exchange: Exchange

    def as_json(self) -> dict[str, object]:
        """Plain values, marked as simulated."""
        return {"simulated": True, **asdict(self)}


def predict(
    profile: Profile,
    machine: Machine,
    num_ranks: int,
    *,
    exchange: Exchange | None = None,
    engine: str | None = None,
    is_strong: bool = False,
) -> Prediction:
    """Predict a step on this many ranks.

    Args:
        profile: One rank's step.
        machine: How ranks are connected.
        num_ranks: On nodes that are full but for the last.
        exchange: How gradients are sent; None: as `hpctrain.distribute` does with the engine.
        engine: Whose costs count, where `exchange` is None.
        is_strong: Efficiency counts from one rank with the batch of all, as in strong scaling;
            otherwise from one with a rank's share.
    """
    layout = RankLayout(num_ranks=num_ranks, ranks_per_node=machine.ranks_per_node)
    chosen = exchange or default_exchange(
        engine,
        layout,
        gradient_bytes=profile.gradient_bytes,
        on_gpu=machine.memory_bytes_per_device > 0,
    )
    best = simulate(profile, machine, layout, chosen, is_strong=is_strong)
    ends = [
        simulate(*inputs, layout, chosen, is_strong=is_strong)
        for pair in _perturbed(profile, machine)
        for inputs in pair
    ]
    return replace(
        best,
        step_s=_spread(best.step_s, [end.step_s for end in ends]),
        efficiency=_spread(best.efficiency, [end.efficiency for end in ends]),
        exposed_s=_spread(best.exposed_s, [end.exposed_s for end in ends]),
    )


def simulate(
    profile: Profile,
    machine: Machine,
    layout: RankLayout,
    exchange: Exchange,
    *,
    is_strong: bool = False,
) -> Prediction:
    """One replay with the inputs as they are."""
    costs = machine.costs_of(exchange.engine)
    contended = machine.slowdown(layout.local_ranks)
    slow = contended * slowest_of(layout.num_ranks, machine.jitter)
    passes = exchange.accumulate
    line = replay(
        profile.layers,
        exchange,
        partial(_allreduce_s, layout=layout, costs=costs, wire=exchange.wire),
        slow=slow,
        num_ranks=layout.num_ranks,
    )
    alone = layout.num_ranks == 1
    exposed = 0.0 if alone else line.exposed_s
    divided = exchange.divided_update and profile.divides_update
    sharing = layout.local_ranks if divided else 1
    update = profile.update_s / sharing * (machine.slowdown(layout.local_ranks))
    compute = passes * profile.compute_s
    step = passes * (profile.input_s + slow * profile.compute_s) + exposed + update
    # What one rank does in a step is divided; its update is not.
    shares = layout.num_ranks if is_strong else 1
    single = passes * (profile.input_s + profile.compute_s) + profile.update_s / shares
    samples = passes * profile.batch
    return Prediction(
        num_ranks=layout.num_ranks,
        num_nodes=layout.num_nodes,
        batch=profile.batch,
        global_batch=samples * layout.num_ranks,
        step_s=_exact(step),
        efficiency=_exact(single / step),
        is_strong=is_strong,
        exposed_s=_exact(exposed),
        input_s=passes * profile.input_s,
        compute_s=compute,
        contention_s=(contended - 1.0) * compute,
        straggling_s=(slow - contended) * compute,
        update_s=update,
        sending_s=0.0 if alone else line.sending_s,
        num_messages=0 if alone else len(line.messages),
        samples_per_s=samples * layout.num_ranks / step,
        exchange=exchange,
    )


def _allreduce_s(num_bytes: float, *, layout: RankLayout, costs: Costs, wire: str) -> float:
    if wire == NONE or layout.num_nodes == 1:
        return allreduce_s(num_bytes, layout, costs)
    return encoded_allreduce_s(num_bytes, layout, costs, ratio=BITS[wire] / BITS[NONE])


def _spread(best: Range, others: list[Range]) -> Range:
    """Effects of independent inputs add up in squares, those that raise and those that lower."""
    changes = [other.value - best.value for other in others]
    down = sqrt(sum(change**2 for change in changes if change < 0))
    up = sqrt(sum(change**2 for change in changes if change > 0))
    return Range(best.value, max(0.0, best.value - down), best.value + up)


def _exact(value: float) -> Range:
    return Range(value, value, value)


def _perturbed(
    profile: Profile, machine: Machine
) -> Iterator[tuple[tuple[Profile, Machine], tuple[Profile, Machine]]]:
    """Each uncertain input alone, a standard deviation down and up.

    They are taken to be independent, so their effects add up in squares.
    """
    if profile.error:
        # A profile of a loaded machine may be uncertain by more than all of it; times stay times.
        scaled = [_scale_times(profile, max(0.05, 1 + sign * profile.error)) for sign in (-1, 1)]
        yield (scaled[0], machine), (scaled[1], machine)
    if machine.jitter_error:
        ends = [
            replace(machine, jitter=machine.jitter * max(0.0, 1 + sign * machine.jitter_error))
            for sign in (-1, 1)
        ]
        yield (profile, ends[0]), (profile, ends[1])
    if machine.contention_error and len(machine.contention) > 1:
        ends = [_contend(machine, 1 + sign * machine.contention_error) for sign in (-1, 1)]
        yield (profile, ends[0]), (profile, ends[1])
    for where in ("intra", "inter"):
        for what in ("latency", "bandwidth"):
            ends = [_link(machine, where, what, sign) for sign in (-1, 1)]
            if ends[0] != ends[1]:
                yield (profile, ends[0]), (profile, ends[1])


def _scale_times(profile: Profile, factor: float) -> Profile:
    layers = tuple(replace(layer, backward_s=layer.backward_s * factor) for layer in profile.layers)
    return replace(profile, forward_s=profile.forward_s * factor, layers=layers)


def _contend(machine: Machine, factor: float) -> Machine:
    points = tuple((n, 1 + max(0.0, factor) * (slow - 1)) for n, slow in machine.contention)
    return replace(machine, contention=points)


def _link(machine: Machine, where: str, what: str, sign: int) -> Machine:
    """The machine with one kind of link changed, for all engines together."""

    def change(link: Link) -> Link:
        if what == "latency":
            return replace(link, latency_s=link.latency_s * max(0.0, 1 + sign * link.latency_error))
        # An error of the bandwidth is one of the time that a byte takes.
        return replace(link, bytes_per_s=link.bytes_per_s * (1 + link.bandwidth_error) ** -sign)

    def change_in(costs: Costs) -> Costs:
        if where == "intra":
            return replace(costs, intra=change(costs.intra))
        return replace(costs, inter=change(costs.inter))

    engines = {name: change_in(costs) for name, costs in machine.engines.items()}
    return replace(machine, costs=change_in(machine.costs), engines=engines)
