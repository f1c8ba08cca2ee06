"""What one grid costs a rank: bytes it holds, bytes it sends, seconds of a step. Pure; simulated.

The bytes are those of `hpctrain.train.Memory`, the seconds those of the replay of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpctrain.grid import Shape
from hpctrain.predict.costs import RankLayout, allreduce_s, slowest_of
from hpctrain.predict.exchange import Exchange, default_exchange
from hpctrain.predict.footprint import Footprint, Unit
from hpctrain.predict.grid_shapes import (
    RankGroup,
    ScheduleName,
    group_of,
    in_flight,
    shared_link,
)
from hpctrain.predict.machine import Machine
from hpctrain.predict.model import replay
from hpctrain.predict.profile import Layer
from hpctrain.train import Memory, ShardLevel, UnitSize

__all__ = [
    "GridTime",
    "PlacedModel",
    "RankBytes",
    "SentBytes",
    "bytes_of",
    "sent_by",
    "time_of",
    "unit_costs",
]

_BACKWARD = 2 / 3
"""The part of computing that is backward: two products for each of forward's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedModel:
    """A model on a grid: everything that a rank's costs follow from."""

    footprint: Footprint
    shape: Shape
    shard: ShardLevel
    stages: tuple[range, ...]
    """By stage: its units."""
    micro_batches: int
    micro_batch: int
    """Samples."""
    schedule: ScheduleName = "1f1b"

    def units(self, stage: int) -> list[Unit]:
        """Of a stage."""
        return [self.footprint.units[index] for index in self.stages[stage]]

    def scaled(self, of_batch: float) -> int:
        """What the measured batch has, for a micro-batch: in proportion."""
        return round(of_batch * self.micro_batch / self.footprint.batch)

    def part(self, whole: float, divided: float) -> float:
        """What is left of a whole on one rank of a tensor group that divides a part of it."""
        return whole - divided * (1 - 1 / self.shape.tensor)

    def received(self, stage: int) -> int:
        """Bytes that a stage gets from the one before it, of a micro-batch."""
        first = self.stages[stage].start
        return self.scaled(self.footprint.units[first - 1].output_bytes) if stage else 0

    def sent(self, stage: int) -> int:
        """Bytes that a stage gives to the one after it, of a micro-batch."""
        last = stage == len(self.stages) - 1
        return 0 if last else self.scaled(self.units(stage)[-1].output_bytes)

    def weights(self, stage: int) -> tuple[int, int]:
        """Bytes of a stage's weights and of those that are trained, as the model stores them."""
        sizes = [self.unit_bytes(unit) for unit in self.units(stage)]
        mine = self.stages[stage]
        tied = sum(
            tie.num_bytes
            for tie in self.footprint.ties
            if tie.other in mine and tie.first not in mine
        )
        return sum(size for size, _ in sizes) + tied, sum(size for _, size in sizes) + tied

    def unit_bytes(self, unit: Unit) -> tuple[int, int]:
        """Bytes of a unit's weights on a rank, and of those that are trained."""
        divided = min(unit.trained, unit.tensor_weights)
        return (
            round(self.part(unit.weights, unit.tensor_weights)),
            round(self.part(unit.trained, divided)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """What a rank of one stage needs."""

    stage: int
    weights: int
    gradients: int
    state: int
    activations: int
    """Of all micro-batches under way."""
    gathered: int
    """Whole weights and gradients, where they are sharded, at the fullest moment of backward. Less
    than 0 where most shards of gradients are not there yet."""
    transient: int
    """What an operation makes and drops again."""

    @property
    def held(self) -> int:
        """From step to step."""
        return self.weights + self.gradients + self.state

    @property
    def total(self) -> int:
        """At the most, at any one time."""
        return self.held + max(0, self.activations + self.gathered + self.transient)


def bytes_of(placed: PlacedModel, stage: int, *, shared_by: int = 1) -> RankBytes:
    """What a rank of a stage needs.

    Args:
        placed: The model on the grid.
        stage: Which.
        shared_by: Ranks of a node that add up in its shared memory; 1: none do.
    """
    footprint, form = placed.footprint, placed.footprint.format
    weights, trained = placed.weights(stage)
    units = placed.units(stage)
    kept_by = [placed.part(unit.activation_bytes, unit.tensor_activation_bytes) for unit in units]
    in_stages = placed.shape.pipeline > 1  # a sharded stage is gathered whole for its pass
    memory = Memory.estimate(
        weights=round(weights * form.stored),
        gradients=round(trained * form.stored),
        optimizer_state=round(trained * (footprint.state_copies + form.master)),
        ranks_per_node=shared_by,
        shares_memory=shared_by > 1,
        shards_update=shared_by > 1,
        shard=placed.shard,
        num_shards=placed.shape.data,
        units=[
            UnitSize(
                round(whole * form.computed), reduced, placed.scaled(kept), one.in_root or in_stages
            )
            for one, (whole, reduced), kept in zip(
                units, map(placed.unit_bytes, units), kept_by, strict=True
            )
        ],
        accumulates=placed.micro_batches > 1,
    )
    count = in_flight(placed.schedule, placed.micro_batches, placed.shape.pipeline, stage)
    cast = sum(unit.cast_bytes for unit in units)
    held = -(-memory.per_node // shared_by)
    state = _held_state(memory, placed, shared_by)
    own = memory.weights
    if placed.shard in ("gradients", "parameters"):
        own = -(-memory.weights // placed.shape.data)
    return RankBytes(
        stage=stage,
        weights=own + sum(unit.buffer_bytes for unit in units),
        gradients=held - own - state,
        state=state,
        activations=count * (placed.scaled(sum(kept_by)) + cast + placed.received(stage)),
        gathered=memory.gathered,
        transient=placed.scaled(footprint.transient_bytes),
    )


def _held_state(memory: Memory, placed: PlacedModel, shared_by: int) -> int:
    if shared_by > 1:
        return memory.optimizer_state // shared_by
    shards = 1 if placed.shard == "none" else placed.shape.data
    return -(-memory.optimizer_state // shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentBytes:
    """What a rank sends in a step, by dimension of the grid."""

    data: int
    pipeline: int
    tensor: int


def sent_by(placed: PlacedModel, stage: int) -> SentBytes:
    """What a rank of a stage sends in a step."""
    weights, trained = placed.weights(stage)
    computed = weights * placed.footprint.format.computed
    data, tensor = placed.shape.data, placed.shape.tensor
    times = placed.micro_batches
    passes, gathers = (1, 1) if placed.shape.pipeline > 1 else (times, 2)
    moved = {
        "none": 2.0 * trained,
        "state": 1.0 * trained + weights,
        "gradients": passes * (computed + trained),
        "parameters": passes * (gathers * computed + trained),
    }[placed.shard]
    inside = sum(unit.tensor_message_bytes for unit in placed.units(stage))
    return SentBytes(
        data=round(moved * (data - 1) / data),
        pipeline=times * (placed.received(stage) + placed.sent(stage)),
        tensor=round(2 * times * placed.scaled(inside) * (tensor - 1) / tensor),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GridTime:
    """Seconds of a step and of its parts. Simulated."""

    step_s: float
    compute_s: float
    """Forward and backward of the slowest stage, all micro-batches."""
    bubble_s: float
    """While a stage has no micro-batch to work on."""
    tensor_s: float
    data_s: float
    """Communication over the data dimension that computing does not hide."""
    pipeline_s: float
    update_s: float


def time_of(
    placed: PlacedModel,
    machine: Machine,
    layout: RankLayout,
    *,
    compute_s: float,
    update_s: float = 0.0,
    engine: str | None = None,
) -> GridTime:
    """A step on a grid, on the clock of the slowest rank.

    Args:
        placed: The model on the grid.
        machine: How ranks are connected.
        layout: All ranks on nodes.
        compute_s: Forward and backward of the measured batch, of the whole model on one rank.
        update_s: The whole model's update on one rank.
        engine: Whose costs of the machine count.
    """
    shape, times = placed.shape, placed.micro_batches
    slow = machine.slowdown(layout.local_ranks) * slowest_of(layout.num_ranks, machine.jitter)
    seconds = _unit_seconds(placed, slow * compute_s)
    passes = [sum(seconds[index] for index in stage) for stage in placed.stages]
    tensor = group_of(shape.tensor, 1, layout)
    inside = [
        sum(_messages_s(placed, unit, tensor, machine, engine) for unit in placed.units(stage))
        for stage in range(shape.pipeline)
    ]
    ticks = [one + two for one, two in zip(passes, inside, strict=True)]
    slowest = max(range(shape.pipeline), key=ticks.__getitem__)
    hop = _hop_s(placed, layout, machine, engine)
    # What is sent while the next micro-batch computes costs nothing, unless it takes longer.
    tick = max(ticks[slowest], 2 * hop)
    group = group_of(shape.data, shape.pipeline * shape.tensor, layout)
    exchange = _exchange(
        engine, group.layout, placed.weights(slowest)[1], machine.memory_bytes_per_device > 0
    )
    data = max(
        _exposed_s(placed, stage, seconds, passes[stage], group, machine, exchange)
        for stage in range(shape.pipeline)
    )
    update = update_s * _update_share(placed, group, exchange)
    update *= machine.slowdown(layout.local_ranks)
    bubble = (shape.pipeline - 1) * tick
    step = times * tick + bubble + 2 * (shape.pipeline - 1) * hop + data + update
    return GridTime(
        step_s=step,
        compute_s=times * passes[slowest],
        bubble_s=bubble,
        tensor_s=times * inside[slowest],
        data_s=data,
        pipeline_s=2 * (shape.pipeline - 1) * hop + times * (tick - ticks[slowest]),
        update_s=update,
    )


@lru_cache(maxsize=1024)
def _exchange(
    engine: str | None, layout: RankLayout, gradient_bytes: int, on_gpu: bool
) -> Exchange:
    """Kept, for grids of one shape ask the same, and engines are looked up on disk."""
    return default_exchange(engine, layout, gradient_bytes=gradient_bytes, on_gpu=on_gpu)


def _update_share(placed: PlacedModel, group: RankGroup, exchange: Exchange) -> float:
    """The part of the whole model's update that the busiest rank makes."""
    whole = sum(unit.trained for unit in placed.footprint.units)
    most = max(placed.weights(stage)[1] for stage in range(placed.shape.pipeline))
    divided = placed.shape.data
    if placed.shard == "none":
        divided = group.layout.local_ranks if exchange.divided_update else 1
    return most / max(1, whole) / divided


def unit_costs(footprint: Footprint, tensor: int = 1) -> list[float]:
    """What units cost relative to each other: operations, or bytes where none were counted."""
    counted = [unit.flops - unit.tensor_flops * (1 - 1 / tensor) for unit in footprint.units]
    if any(counted):
        return counted
    return [float(unit.weights + unit.activation_bytes) for unit in footprint.units]


def _unit_seconds(placed: PlacedModel, compute_s: float) -> list[float]:
    """Of a micro-batch, by unit."""
    whole = sum(unit_costs(placed.footprint))
    scale = compute_s * placed.micro_batch / placed.footprint.batch / whole
    return [cost * scale for cost in unit_costs(placed.footprint, placed.shape.tensor)]


def _messages_s(
    placed: PlacedModel, unit: Unit, group: RankGroup, machine: Machine, engine: str | None
) -> float:
    """Allreduces of a unit over its tensor group, of a micro-batch; computing waits for each."""
    if not unit.tensor_messages:
        return 0.0
    size = placed.scaled(unit.tensor_message_bytes) / unit.tensor_messages
    costs = group.costs(machine.costs_of(engine))
    return unit.tensor_messages * allreduce_s(size, group.layout, costs)


def _hop_s(placed: PlacedModel, layout: RankLayout, machine: Machine, engine: str | None) -> float:
    """One micro-batch from a stage to the next, at the widest place."""
    if placed.shape.pipeline == 1:
        return 0.0
    most = max(placed.sent(stage) for stage in range(placed.shape.pipeline))
    group = group_of(placed.shape.pipeline, placed.shape.tensor, layout)
    costs = machine.costs_of(engine)
    if group.layout.num_nodes == 1:
        return costs.intra.latency_s + most / costs.intra.bytes_per_s
    # Where a node ends, all of a tensor group send at the same time.
    link = shared_link(costs.inter, min(placed.shape.tensor, layout.local_ranks))
    return link.latency_s + most / link.bytes_per_s


def _exposed_s(
    placed: PlacedModel,
    stage: int,
    seconds: Sequence[float],
    pass_s: float,
    group: RankGroup,
    machine: Machine,
    exchange: Exchange,
) -> float:
    """Communication of a stage over the data dimension that computing does not hide."""
    if placed.shape.data == 1:
        return 0.0
    costs = group.costs(machine.costs_of(exchange.engine))

    def half_s(size: float) -> float:
        """An allgather or a reduce-scatter: one of the two halves of an allreduce."""
        return allreduce_s(size, group.layout, costs) / 2

    sizes = [placed.unit_bytes(unit) for unit in placed.units(stage)]
    if placed.shard in ("none", "state"):
        layers = [
            Layer(
                name=unit.name,
                backward_s=_BACKWARD * seconds[index],
                gradient_bytes=placed.unit_bytes(unit)[1],
            )
            for index, unit in reversed(
                list(zip(placed.stages[stage], placed.units(stage), strict=True))
            )
        ]
        is_whole = placed.shard == "none"
        cost = (lambda size: 2 * half_s(size)) if is_whole else half_s
        line = replay(layers, exchange, cost, num_ranks=placed.shape.data)
        return line.exposed_s + (0.0 if is_whole else half_s(placed.weights(stage)[0]))
    computed = placed.footprint.format.computed
    if placed.shape.pipeline > 1:  # once a step, before and after the pass through the stages
        return half_s(sum(w for w, _ in sizes) * computed) + half_s(sum(g for _, g in sizes))
    gathers = 2 if placed.shard == "parameters" else 1
    moving = sum(gathers * half_s(w * computed) + half_s(g) for w, g in sizes)
    # Nothing hides the first unit's weights on their way, nor its gradients, which are the last.
    ends = half_s(sizes[0][0] * computed) + half_s(sizes[0][1])
    hidden = pass_s if exchange.overlap else 0.0
    return placed.micro_batches * max(moving - hidden, ends)
