"""A job on virtual ranks: batches, memory and checkpoints, and what would break. Pure.

Batches, shares and the checkpoint's parts come from the very functions that real ranks use, called
for each virtual rank; nothing is estimated there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil

from hpctrain.checkpoint import Item, choose_ranks, divide
from hpctrain.data import Batching, Seat, cyclic
from hpctrain.log import format_bytes
from hpctrain.predict.costs import RankLayout
from hpctrain.predict.machine import Machine
from hpctrain.predict.model import Range
from hpctrain.tables import count_of, number_of, positive
from hpctrain.train import Memory

__all__ = [
    "Files",
    "JobLimits",
    "Loading",
    "MemoryUse",
    "Problem",
    "Rehearsed",
    "Share",
    "State",
    "TrainingRun",
    "rehearse",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """What is trained on: samples and batches, as the configuration has them."""

    num_samples: int
    global_batch: int
    """Samples of a step over all ranks, its parts together."""
    accumulate: int = 1
    """Number of parts that a step is computed in."""
    epochs: int = 1
    steps: int | None = None
    """Steps of the whole training, instead of epochs."""
    drop_last: bool = False
    even_last: bool = True
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch", "accumulate", "epochs"):
            count_of(getattr(self, name), name)
        count_of(self.warmup_steps, "warmup_steps", least=0)
        if self.steps is not None:
            count_of(self.steps, "steps")

    @property
    def batching(self) -> Batching:
        """How the loader cuts an epoch: into the parts of steps."""
        return Batching(
            global_batch=max(1, self.global_batch // self.accumulate),
            drop_last=self.drop_last,
            even_last=self.even_last,
        )

    @property
    def steps_per_epoch(self) -> int:
        """A window of parts that an epoch's end cuts short is a step as well."""
        return -(-self.batching.count(self.num_samples) // self.accumulate)

    @property
    def num_steps(self) -> int:
        """Of the whole training."""
        return self.steps if self.steps is not None else self.epochs * self.steps_per_epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What is held and saved."""

    weights: tuple[Item, ...]
    state_copies: float = 2.0
    """Optimizer state in sizes of the weights: 2 for Adam, 1 for momentum, 0 for plain SGD."""
    activation_bytes_per_sample: int = 0
    """Memory that backward needs besides the model; 0: unknown, and not in any estimate."""

    def __post_init__(self) -> None:
        number_of(self.state_copies, "state_copies")
        count_of(self.activation_bytes_per_sample, "activation_bytes_per_sample", least=0)

    @property
    def weight_bytes(self) -> int:
        """Of one copy."""
        return sum(item.num_bytes for item in self.weights)

    @property
    def saved(self) -> list[Item]:
        """What a checkpoint holds: weights, and as many copies as the optimizer has."""
        whole = int(self.state_copies)
        copies = [
            Item(
                name=f"optimizer.{copy}.{item.name}",
                num_elements=item.num_elements,
                element_bytes=item.element_bytes,
            )
            for copy in range(whole)
            for item in self.weights
        ]
        return [*self.weights, *copies]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Samples of one batch on the ranks that have least and most."""

    global_samples: int
    fewest: int
    most: int
    num_empty: int
    """Ranks with none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """How batches are dealt to the ranks."""

    full: Share
    last: Share
    """The last batch of an epoch."""
    num_batches: int
    scattered: tuple[int, int]
    """The fewest and the most samples that a rank gets of scattered data."""

    @classmethod
    def of(cls, training: TrainingRun, num_ranks: int) -> Loading:
        """Deal as the loader does, to each virtual rank."""
        batching, total = training.batching, training.num_samples
        count = batching.count(total)
        first = range(0, batching.next_size(total))
        # From here on the end decides: nothing before depends on it.
        start = max(0, (count - 3) * batching.global_batch)
        last = first
        for batch in batching.cut(start, total):
            last = batch
        every = [len(cyclic(total, num_ranks, rank)) for rank in range(num_ranks)]
        return cls(
            full=_share(first, num_ranks),
            last=_share(last, num_ranks),
            num_batches=count,
            scattered=(min(every), max(every)),
        )


def _share(batch: range, num_ranks: int) -> Share:
    counts = [len(Seat(rank=rank, num_ranks=num_ranks).part_of(batch)) for rank in range(num_ranks)]
    return Share(
        global_samples=len(batch),
        fewest=min(counts),
        most=max(counts),
        num_empty=counts.count(0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes in memory; activations are in them only where they were given."""

    per_rank: int
    per_node: int
    on_device: bool
    """Whether ranks hold it on a GPU each; otherwise the node's memory has it all."""

    @classmethod
    def of(cls, state: State, layout: RankLayout, *, rank_batch: int, on_device: bool) -> MemoryUse:
        """The estimate of a training's plan, and the activations that were given."""
        active = state.activation_bytes_per_sample * rank_batch
        ranks = layout.local_ranks
        shares = not on_device and ranks > 1
        memory = Memory.estimate(
            weights=state.weight_bytes,
            gradients=state.weight_bytes,
            optimizer_state=int(state.state_copies * state.weight_bytes),
            ranks_per_node=ranks,
            shares_memory=shares,
            shards_update=shares,
        )
        return cls(
            per_rank=memory.per_rank + active,
            per_node=memory.per_node + active * ranks,
            on_device=on_device,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """A checkpoint's parts."""

    num_bytes: int
    writers: tuple[int, ...]
    """The ranks that write."""
    largest_part: int
    most_on_a_node: int
    """Bytes that one node's writers stage in memory."""

    @classmethod
    def of(cls, state: State, layout: RankLayout) -> Files:
        """Divide as the store does."""
        node_of = [rank // layout.ranks_per_node for rank in range(layout.num_ranks)]
        items = state.saved
        total = sum(item.num_bytes for item in items)
        writers = choose_ranks(node_of, total)
        parts = divide(items, len(writers))
        sizes = [sum(piece.num_bytes for piece in part) for part in parts]
        staged: dict[int, int] = {}
        for writer, size in zip(writers, sizes, strict=True):
            node = node_of[writer]
            staged[node] = staged.get(node, 0) + size
        return cls(
            num_bytes=total,
            writers=writers,
            largest_part=max(sizes),
            most_on_a_node=max(staged.values()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLimits:
    """What a job has: time, and space for checkpoints. None: unknown, not checked."""

    walltime_s: float | None = None
    max_requeues: int = 0
    """How often the job may be restarted to continue."""
    checkpoint_free_bytes: int | None = None
    keep: int = 3
    """Checkpoints that are kept."""

    def __post_init__(self) -> None:
        count_of(self.max_requeues, "max_requeues", least=0)
        count_of(self.keep, "keep")
        if self.walltime_s is not None:
            positive(self.walltime_s, "walltime_s")
        if self.checkpoint_free_bytes is not None:
            count_of(self.checkpoint_free_bytes, "checkpoint_free_bytes", least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing to know before queueing."""

    level: str
    """`error`: the job would fail or end too early; `warning`: it would be slower than
    necessary."""
    part: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """A job on virtual ranks. Times are simulated; the rest is what real ranks would do."""

    num_ranks: int
    num_nodes: int
    steps_per_epoch: int
    num_steps: int
    loading: Loading
    holding: MemoryUse
    files: Files
    simulated_s: Range | None
    """Of all steps, without start, evaluation and saving."""
    findings: tuple[Problem, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing would break."""
        return all(finding.level != "error" for finding in self.findings)

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {"is_sound": self.is_sound, **asdict(self)}


def rehearse(
    training: TrainingRun,
    state: State,
    layout: RankLayout,
    machine: Machine | None = None,
    *,
    step_s: Range | None = None,
    limits: JobLimits | None = None,
) -> Rehearsed:
    """Run a job's arithmetic for every virtual rank.

    Args:
        training: Samples and batches.
        state: What is held and saved.
        layout: Ranks on nodes.
        machine: Whose memory there is; None: unknown.
        step_s: A predicted step; None: time is not checked.
        limits: What the job has.
    """
    given = limits or JobLimits()
    on_device = machine is not None and machine.memory_bytes_per_device > 0
    loading = Loading.of(training, layout.num_ranks)
    holding = MemoryUse.of(state, layout, rank_batch=loading.full.most, on_device=on_device)
    files = Files.of(state, layout)
    steps = training.num_steps
    total = None
    if step_s is not None:
        total = Range(*(steps * each for each in (step_s.value, step_s.low, step_s.high)))
    found = [
        *_of_batches(training, loading, layout.num_ranks),
        *_of_schedule(training),
        *_of_memory(holding, files, machine),
        *_of_checkpoints(files, given),
        *_of_time(total, given),
    ]
    return Rehearsed(
        num_ranks=layout.num_ranks,
        num_nodes=layout.num_nodes,
        steps_per_epoch=training.steps_per_epoch,
        num_steps=steps,
        loading=loading,
        holding=holding,
        files=files,
        simulated_s=total,
        findings=tuple(found),
    )


def _error(part: str, text: str) -> Problem:
    return Problem(level="error", part=part, text=text)


def _warning(part: str, text: str) -> Problem:
    return Problem(level="warning", part=part, text=text)


def _of_batches(training: TrainingRun, loading: Loading, num_ranks: int) -> Iterator[Problem]:
    full, last = loading.full, loading.last
    if training.global_batch % training.accumulate:
        yield _error(
            "batch",
            f"global_batch={training.global_batch} does not divide into "
            f"accumulate={training.accumulate} parts; choose a multiple",
        )
    if loading.num_batches == 0:
        yield _error(
            "batch",
            f"{training.num_samples} samples make no full batch of {training.global_batch}, and "
            "drop_last leaves out the rest: an epoch has no step",
        )
        return
    if training.global_batch > training.num_samples:
        yield _warning(
            "batch",
            f"a global batch of {training.global_batch} is more than the {training.num_samples} "
            "samples of an epoch: no step has more",
        )
    if loading.scattered[0] == 0:
        yield _error(
            "partition",
            f"{training.num_samples} samples on {num_ranks} ranks: scattered data leaves some "
            "ranks with an empty share; use fewer ranks",
        )
    if full.num_empty:
        yield _error(
            "batch",
            f"a batch of {full.global_samples} on {num_ranks} ranks leaves {full.num_empty} of "
            f"them without a sample at every step; use at most {full.global_samples} ranks, fewer "
            "parts, or a larger global batch",
        )
    elif full.fewest != full.most:
        lost = 1 - full.global_samples / (full.most * num_ranks)
        yield _warning(
            "batch",
            f"a batch of {full.global_samples} does not divide over {num_ranks} ranks: some "
            f"compute {full.most} samples, others {full.fewest}, and {lost:.0%} of the time is "
            "waiting",
        )
    if last.num_empty and not full.num_empty:
        yield _warning(
            "batch",
            f"the last batch of an epoch has {last.global_samples} samples: {last.num_empty} ranks "
            "have none of it; drop_last leaves it out",
        )


def _of_schedule(training: TrainingRun) -> Iterator[Problem]:
    if training.warmup_steps > training.num_steps:
        yield _error(
            "schedule",
            f"warm-up takes {training.warmup_steps} steps, and the training has only "
            f"{training.num_steps} on this global batch; shorten it",
        )


def _of_memory(holding: MemoryUse, files: Files, machine: Machine | None) -> Iterator[Problem]:
    if machine is None:
        return
    device, node = machine.memory_bytes_per_device, machine.memory_bytes_per_node
    if holding.on_device and holding.per_rank > device:
        yield _error(
            "memory",
            f"a rank holds {format_bytes(holding.per_rank)}, and its GPU has "
            f"{format_bytes(device)}; accumulate in more parts, or checkpoint activations",
        )
    if not node:
        return
    need = files.most_on_a_node + (0 if holding.on_device else holding.per_node)
    if need > node:
        yield _error(
            "memory",
            f"a node's ranks hold {format_bytes(need)}, checkpoint under way included, and a "
            f"node has {format_bytes(node)}; use fewer ranks a node",
        )


def _of_checkpoints(files: Files, limits: JobLimits) -> Iterator[Problem]:
    free = limits.checkpoint_free_bytes
    need = (limits.keep + 1) * files.num_bytes
    if free is not None and need > free:
        yield _error(
            "checkpoint",
            f"{limits.keep} checkpoints that are kept and one under way take {format_bytes(need)}, "
            f"and there are {format_bytes(free)}; keep fewer, or save elsewhere",
        )


def _of_time(total: Range | None, limits: JobLimits) -> Iterator[Problem]:
    if total is None or limits.walltime_s is None:
        return
    have = limits.walltime_s * (1 + limits.max_requeues)
    if total.value > have:
        jobs = ceil(total.value / limits.walltime_s)
        yield _error(
            "walltime",
            f"the steps alone take {_hours(total.value)} by the prediction (simulated), and there "
            f"are {_hours(have)}; request more, or {jobs - 1} requeues",
        )
    elif total.high > have:
        yield _warning(
            "walltime",
            f"the steps take {_hours(total.value)} by the prediction (simulated), perhaps "
            f"{_hours(total.high)}, and there are {_hours(have)}",
        )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h"
