"""Which grid to take: every factoring of N ranks and every level of sharding, and the best. Pure.

What does not fit is left out; of the rest the fastest is taken, or, where no times are known, the
one that changes least. Times are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from hpctrain.errors import ConfigError
from hpctrain.grid import Shape, factorings
from hpctrain.log import format_bytes, format_seconds
from hpctrain.pipeline import LayerCost, balance_stages
from hpctrain.predict.costs import RankLayout
from hpctrain.predict.footprint import Footprint
from hpctrain.predict.grid_costs import (
    GridTime,
    PlacedModel,
    RankBytes,
    SentBytes,
    bytes_of,
    sent_by,
    time_of,
    unit_costs,
)
from hpctrain.predict.grid_shapes import ScheduleName
from hpctrain.predict.machine import Machine
from hpctrain.tables import count_of, number_of, positive
from hpctrain.train import SHARDS, ShardLevel

__all__ = [
    "HEADROOM",
    "Compute",
    "GridChoice",
    "GridPlan",
    "choose_grid",
    "find_odd_pair",
    "plan_grids",
]

HEADROOM = 0.1
"""The part of a rank's memory that is left to the driver, to fragmentation and to messages."""
_WORTH = 0.02
"""What brings less than this is within what a prediction can tell: what changes least is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """How fast a rank computes, and how ranks are connected: what times follow from."""

    machine: Machine
    compute_s: float
    """Forward and backward of the measured batch, of the whole model on one rank."""
    update_s: float = 0.0
    engine: str | None = None

    @classmethod
    def at(
        cls, tflops: float, footprint: Footprint, machine: Machine, engine: str | None = None
    ) -> Compute:
        """From what a rank reaches in training; the update then costs nothing.

        Raises:
            ConfigError: the model has no operations that are counted.
        """
        if not footprint.flops:
            raise ConfigError(
                f"{footprint.model} has no matrix product or convolution whose operations could be "
                "counted; measure its times by `hpctrain plan --measure-profile`"
            )
        seconds = footprint.flops / (positive(tflops, "tflops") * 1e12)
        return cls(machine=machine, compute_s=seconds, engine=engine)


@dataclass(frozen=True, kw_only=True, slots=True)
class GridChoice:
    """One way to train on so many ranks."""

    shape: Shape
    shard: ShardLevel
    stages: tuple[tuple[str, ...], ...]
    """By stage: the names of its units."""
    cuts: tuple[str, ...]
    """The layers at which the stages but the first begin, as `hpctrain.split` takes them."""
    micro_batches: int
    micro_batch: int
    """Samples of each."""
    schedule: ScheduleName
    need: RankBytes
    """Of the stage that needs most."""
    sent: SentBytes
    """Of the stage that sends most."""
    time: GridTime | None
    """None: not known."""
    efficiency: float | None
    """Computing that ranks would need without waiting and messages, over the step."""
    spare: int | None
    """Bytes that are left; negative: it does not fit; None: not known."""

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as that is known."""
        return self.spare is None or self.spare >= 0

    def __str__(self) -> str:
        shard = f", shard {self.shard}" if self.shard != "none" else ""
        return f"{self.shape}{shard}, {self.micro_batches} x {self.micro_batch} samples"

    def as_json(self) -> dict[str, object]:
        """Plain values, marked as simulated."""
        data = asdict(self)
        data["shape"] = self.shape._asdict()
        data["need"] |= {"held": self.need.held, "total": self.need.total}
        return {"simulated": True, "fits": self.fits, **data}


@dataclass(frozen=True, kw_only=True, slots=True)
class GridPlan:
    """All grids of a number of ranks, best first, and why the best is best."""

    num_ranks: int
    global_batch: int
    memory_per_rank: int | None
    choices: tuple[GridChoice, ...]
    refused: tuple[tuple[Shape, str], ...]
    """What is not possible, and why."""
    why: tuple[str, ...]

    @property
    def best(self) -> GridChoice | None:
        """What is proposed; None: nothing fits."""
        return next((choice for choice in self.choices if choice.fits), None)

    @property
    def runner_up(self) -> GridChoice | None:
        """The next best."""
        return next((c for c in self.choices if c.fits and c is not self.best), None)

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        best, second = self.best, self.runner_up
        return {
            "num_ranks": self.num_ranks,
            "global_batch": self.global_batch,
            "memory_per_rank": self.memory_per_rank,
            "proposal": None if best is None else best.as_json(),
            "runner_up": None if second is None else second.as_json(),
            "why": list(self.why),
            "grids": [choice.as_json() for choice in self.choices],
            "refused": [{"shape": shape._asdict(), "why": why} for shape, why in self.refused],
        }


def choose_grid(
    footprint: Footprint,
    num_ranks: int,
    memory_per_rank: int,
    *,
    global_batch: int | None = None,
    compute: Compute | None = None,
    ranks_per_node: int | None = None,
) -> tuple[GridChoice, str]:
    """The grid to take, and why.

    Args:
        footprint: What the model holds and computes.
        num_ranks: All of them.
        memory_per_rank: Bytes; a part is kept free (HEADROOM).
        global_batch: Samples of a step; None: the measured batch on every rank.
        compute: What times follow from; None: the grid that changes least.
        ranks_per_node: Where `compute` does not say it; None: all on one node.

    Raises:
        ConfigError: none fits, with what the smallest needs.
    """
    plan = plan_grids(
        footprint,
        num_ranks,
        memory_per_rank=memory_per_rank,
        global_batch=global_batch,
        compute=compute,
        ranks_per_node=ranks_per_node,
    )
    if plan.best is None:
        raise ConfigError("; ".join(plan.why))
    return plan.best, "; ".join(plan.why)


def find_odd_pair(shape: Shape, shard: ShardLevel) -> str | None:
    """What `hpctrain.split` would refuse to do together, or None. Pure."""
    if shard == "state" and shape.pipeline * shape.tensor > 1:
        return "split cannot do shard='state' together with stages= or tensor="
    return None


def plan_grids(
    footprint: Footprint,
    num_ranks: int,
    *,
    memory_per_rank: int | None,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    compute: Compute | None = None,
    ranks_per_node: int | None = None,
    shares_memory: bool = False,
    schedule: ScheduleName = "1f1b",
    find_trouble: Callable[[Shape, ShardLevel], str | None] = find_odd_pair,
) -> GridPlan:
    """Every grid of so many ranks with what it costs, best first.

    Args:
        footprint: What the model holds and computes.
        num_ranks: All of them.
        memory_per_rank: Bytes; None: not known, and everything fits.
        global_batch: Samples of a step; None: the measured batch on every rank.
        micro_batch: Samples of a micro-batch; None: what is best.
        compute: What times follow from; None: times are not known.
        ranks_per_node: None: the machine's, or all on one node.
        shares_memory: Whether ranks of a node add up in its shared memory, where nothing is cut.
        schedule: Of pipelines.
        find_trouble: Why a shape and a level of sharding do not go together.

    Raises:
        ConfigError: a number is out of range.
    """
    batch = footprint.batch * count_of(num_ranks, "num_ranks")
    if global_batch is not None:
        batch = count_of(global_batch, "global_batch")
    if memory_per_rank is not None:
        count_of(memory_per_rank, "memory_per_rank")
    if compute is not None:
        number_of(compute.compute_s, "compute_s")
    per_node = ranks_per_node or (compute.machine.ranks_per_node if compute else num_ranks)
    layout = RankLayout(num_ranks=num_ranks, ranks_per_node=per_node)
    setting = _Setting(footprint, layout, batch, micro_batch, compute, schedule, memory_per_rank)
    found: list[GridChoice] = []
    refused: list[tuple[Shape, str]] = []
    for shape in factorings(num_ranks):
        if trouble := setting.trouble(shape):
            refused.append((shape, trouble))
            continue
        for shard in SHARDS if shape.data > 1 else SHARDS[:1]:
            if trouble := find_trouble(shape, shard):
                refused.append((shape, trouble))
                continue
            whole = shape.data == num_ranks and shard == "none"
            shared = layout.local_ranks if shares_memory and whole else 1
            found.append(setting.best(shape, shard, shared))
    ordered = _ordered(found)
    return GridPlan(
        num_ranks=num_ranks,
        global_batch=batch,
        memory_per_rank=memory_per_rank,
        choices=ordered,
        refused=tuple(refused),
        why=tuple(_reasons(ordered, refused, memory_per_rank)),
    )


def _ordered(choices: Sequence[GridChoice]) -> tuple[GridChoice, ...]:
    """What fits first, the fastest first, before these what changes least of about equal ones."""
    rows = sorted(choices, key=_order)
    times = [choice.time.step_s for choice in rows if choice.fits and choice.time]
    if times:
        near = [c for c in rows if c.fits and c.time and c.time.step_s <= times[0] * (1 + _WORTH)]
        first = min(near, key=_changes)
        rows = [first, *(choice for choice in rows if choice is not first)]
    return tuple(rows)


def _changes(choice: GridChoice) -> tuple[int, ...]:
    """How much a grid changes of plain data parallelism, the gravest first."""
    level = SHARDS.index(choice.shard)
    return (choice.shape.tensor, choice.shape.pipeline, level, choice.micro_batches)


def _order(choice: GridChoice) -> tuple[float, ...]:
    if not choice.fits:
        return (1, choice.need.total, *_changes(choice))
    return (0, choice.time.step_s if choice.time else 0.0, *_changes(choice))


@dataclass(frozen=True)
class _Setting:
    """What is the same for all grids."""

    footprint: Footprint
    layout: RankLayout
    global_batch: int
    micro_batch: int | None
    compute: Compute | None
    schedule: ScheduleName
    memory: int | None

    def trouble(self, shape: Shape) -> str | None:
        """Why a grid is not possible."""
        if shape.pipeline > 1 and self.footprint.no_stages:
            return f"no stages: {self.footprint.no_stages}"
        layers = len(self.footprint.layers)
        if shape.pipeline > layers:
            return f"{shape.pipeline} stages, and the model has {layers} layers with weights"
        if self.global_batch % shape.data:
            return f"a global batch of {self.global_batch} does not divide by data={shape.data}"
        if not self._counts(shape):
            return (
                f"a micro-batch of {self.micro_batch} does not divide the "
                f"{self.global_batch // shape.data} samples of a data coordinate"
            )
        if shape.tensor > 1:
            sizes = self.footprint.tensor_sizes
            if not sizes:
                return "no module was named that tensor parallelism divides (--tensor)"
            for name, size in sizes:
                if size % shape.tensor:
                    return f"{name} has {size} to divide, which {shape.tensor} does not"
        return None

    def _counts(self, shape: Shape) -> list[int]:
        """The numbers of micro-batches there can be."""
        share = self.global_batch // shape.data
        if self.micro_batch is not None:
            return [] if share % self.micro_batch else [share // self.micro_batch]
        return [count for count in range(1, share + 1) if share % count == 0]

    def best(self, shape: Shape, shard: ShardLevel, shared_by: int) -> GridChoice:
        """With the best number of micro-batches: the fewest among about equally fast ones."""
        all_ = [self._choice(shape, shard, count, shared_by) for count in self._counts(shape)]
        fitting = [choice for choice in all_ if choice.fits]
        if not fitting:
            return min(all_, key=lambda choice: (choice.need.total, choice.micro_batches))
        times = [choice.time.step_s for choice in fitting if choice.time]
        if not times:
            return fitting[0] if shape.pipeline == 1 else self._filled(fitting)
        limit = min(times) * (1 + _WORTH)
        return next(choice for choice in fitting if choice.time and choice.time.step_s <= limit)

    @staticmethod
    def _filled(fitting: Sequence[GridChoice]) -> GridChoice:
        """Without times: at least four micro-batches a stage, a bubble of a fifth at most."""
        wanted = 4 * fitting[0].shape.pipeline
        enough = [choice for choice in fitting if choice.micro_batches >= wanted]
        return enough[0] if enough else fitting[-1]

    def _choice(self, shape: Shape, shard: ShardLevel, count: int, shared_by: int) -> GridChoice:
        stages = _stages(self.footprint, shape.pipeline, shape.tensor)
        placed = PlacedModel(
            footprint=self.footprint,
            shape=shape,
            shard=shard,
            stages=stages,
            micro_batches=count,
            micro_batch=self.global_batch // shape.data // count,
            schedule=self.schedule,
        )
        needs = [bytes_of(placed, stage, shared_by=shared_by) for stage in range(shape.pipeline)]
        need = max(needs, key=lambda each: each.total)
        sent = [sent_by(placed, stage) for stage in range(shape.pipeline)]
        time, efficiency = None, None
        if self.compute is not None:
            given = self.compute
            time = time_of(
                placed,
                given.machine,
                self.layout,
                compute_s=given.compute_s,
                update_s=given.update_s,
                engine=given.engine,
            )
            alone = given.compute_s * self.global_batch / self.footprint.batch
            efficiency = alone / shape.size / time.step_s
        spare = None
        if self.memory is not None:
            spare = int(self.memory * (1 - HEADROOM)) - need.total
        units = self.footprint.units
        begins = [units[stage.start] for stage in stages[1:]]
        return GridChoice(
            shape=shape,
            shard=shard,
            stages=tuple(tuple(units[index].name for index in stage) for stage in stages),
            cuts=tuple(unit.layer or unit.name for unit in begins),
            micro_batches=count,
            micro_batch=placed.micro_batch,
            schedule=self.schedule,
            need=need,
            sent=max(sent, key=lambda each: each.data + each.pipeline + each.tensor),
            time=time,
            efficiency=efficiency,
            spare=spare,
        )


@lru_cache(maxsize=256)
def _stages(footprint: Footprint, num_stages: int, tensor: int) -> tuple[range, ...]:
    """The cut that makes the slowest stage as fast as it can be; of equal ones, the smallest."""
    seconds = unit_costs(footprint, tensor)
    layers = footprint.layers
    costs = [
        LayerCost(
            seconds=sum(seconds[index] for index in layer),
            num_bytes=sum(
                footprint.units[index].weights + footprint.units[index].activation_bytes
                for index in layer
            ),
        )
        for layer in layers
    ]
    return tuple(
        range(layers[own.start].start, layers[own.stop - 1].stop)
        for own in balance_stages(costs, num_stages)
    )


def _reasons(
    choices: Sequence[GridChoice], refused: Sequence[tuple[Shape, str]], memory: int | None
) -> Iterator[str]:
    """Why the first is taken, in plain words."""
    if not choices:
        yield f"no grid is possible: {'; '.join(dict.fromkeys(why for _, why in refused))}"
        return
    fitting = [choice for choice in choices if choice.fits]
    told = (
        ""
        if memory is None
        else f"{format_bytes(memory * (1 - HEADROOM))} of " + format_bytes(memory)
    )
    if not fitting:
        least = choices[0]
        yield (
            f"no grid fits: the smallest, {least}, needs {format_bytes(least.need.total)} a rank, "
            f"{format_bytes(-(least.spare or 0))} more than there are ({told}); use more ranks, "
            "checkpoint activations, or name modules that tensor parallelism can divide"
        )
        return
    best = fitting[0]
    if memory is not None:
        yield (
            f"{best} needs {format_bytes(best.need.total)} a rank and leaves "
            f"{format_bytes(best.spare or 0)} of what may be used ({told})"
        )
        over = [choice for choice in choices if not choice.fits]
        if over:
            plain = max(over, key=lambda choice: (choice.shape.data, choice.shard == "none"))
            yield (
                f"{len(over)} of {len(choices)} grids do not fit: {plain} would need "
                f"{format_bytes(plain.need.total)}, {format_bytes(-(plain.spare or 0))} too much"
            )
    if best.time is None:
        yield "times are not known: of what fits it changes least (sharding, then stages)"
    else:
        yield (
            f"it is the fastest of {len(fitting)} that fit, or within {_WORTH:.0%} of it with less "
            f"changed: {format_seconds(best.time.step_s)} a step (simulated), "
            f"{best.efficiency:.0%} of it computing"
        )
    if len(fitting) > 1:
        yield f"the runner-up, {fitting[1]}, {_difference(best, fitting[1])}"


def _difference(best: GridChoice, second: GridChoice) -> str:
    """What the second would cost."""
    bytes_ = second.need.total - best.need.total
    word = "more" if bytes_ >= 0 else "less"
    memory = f"{format_bytes(abs(bytes_))} {word} a rank"
    if best.time is None or second.time is None:
        return f"would need {memory}"
    longer = second.time.step_s / best.time.step_s - 1
    return f"would take {abs(longer):.1%} {'longer' if longer >= 0 else 'less'} and need {memory}"
