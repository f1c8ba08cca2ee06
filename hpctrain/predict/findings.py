"""What a rehearsal finds: what would break, what would be slow, in words with the cure. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil

from hpctrain.predict.checks import count_of, positive
from hpctrain.predict.collectives import Layout
from hpctrain.predict.machine import Machine
from hpctrain.predict.prediction import Range
from hpctrain.predict.rehearsal import Files, Holding, Loading, State, Training

__all__ = ["Finding", "Rehearsed", "Room", "rehearse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a job has: time, and space for checkpoints. None: not said, not looked at."""

    walltime_s: float | None = None
    max_requeues: int = 0
    """How often the job may be started again where it stopped."""
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
class Finding:
    """One thing to know before queueing."""

    level: str
    """`error`: the job would break or end too early; `warning`: it would be slower than need be."""
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
    holding: Holding
    files: Files
    simulated_s: Range | None
    """Of all steps, without start, evaluation and saving."""
    findings: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing would break."""
        return all(finding.level != "error" for finding in self.findings)

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {"is_sound": self.is_sound, **asdict(self)}


def rehearse(
    training: Training,
    state: State,
    layout: Layout,
    machine: Machine | None = None,
    *,
    step_s: Range | None = None,
    room: Room | None = None,
) -> Rehearsed:
    """Run a job's arithmetic for every virtual rank.

    Args:
        training: Samples and batches.
        state: What is held and saved.
        layout: Ranks on nodes.
        machine: Whose memory there is; None: nobody knows.
        step_s: A predicted step; None: time is not looked at.
        room: What the job has.
    """
    given = room or Room()
    on_device = machine is not None and machine.memory_bytes_per_device > 0
    loading = Loading.of(training, layout.num_ranks)
    holding = Holding.of(state, layout, rank_batch=loading.full.most, on_device=on_device)
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


def _error(part: str, text: str) -> Finding:
    return Finding(level="error", part=part, text=text)


def _warning(part: str, text: str) -> Finding:
    return Finding(level="warning", part=part, text=text)


def _of_batches(training: Training, loading: Loading, num_ranks: int) -> Iterator[Finding]:
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
            "samples of an epoch: no step has more than these",
        )
    if loading.scattered[0] == 0:
        yield _error(
            "partition",
            f"{training.num_samples} samples on {num_ranks} ranks: scattered data leaves some "
            "ranks an empty share; use fewer ranks",
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


def _of_schedule(training: Training) -> Iterator[Finding]:
    if training.warmup_steps > training.num_steps:
        yield _error(
            "schedule",
            f"warm-up takes {training.warmup_steps} steps, and the training has only "
            f"{training.num_steps} on this global batch; shorten it",
        )


def _of_memory(holding: Holding, files: Files, machine: Machine | None) -> Iterator[Finding]:
    if machine is None:
        return
    device, node = machine.memory_bytes_per_device, machine.memory_bytes_per_node
    if holding.on_device and holding.per_rank > device:
        yield _error(
            "memory",
            f"a rank holds {_size(holding.per_rank)}, and its GPU has {_size(device)}; accumulate "
            "in more parts, or checkpoint activations",
        )
    if not node:
        return
    need = files.most_on_a_node + (0 if holding.on_device else holding.per_node)
    if need > node:
        yield _error(
            "memory",
            f"a node's ranks hold {_size(need)}, checkpoint under way included, and a node has "
            f"{_size(node)}; use fewer ranks a node",
        )


def _of_checkpoints(files: Files, room: Room) -> Iterator[Finding]:
    free = room.checkpoint_free_bytes
    need = (room.keep + 1) * files.num_bytes
    if free is not None and need > free:
        yield _error(
            "checkpoint",
            f"{room.keep} checkpoints that are kept and one under way take {_size(need)}, and "
            f"there are {_size(free)}; keep fewer, or save elsewhere",
        )


def _of_time(total: Range | None, room: Room) -> Iterator[Finding]:
    if total is None or room.walltime_s is None:
        return
    have = room.walltime_s * (1 + room.max_requeues)
    if total.value > have:
        jobs = ceil(total.value / room.walltime_s)
        yield _error(
            "walltime",
            f"the steps alone take {_hours(total.value)} by the prediction (simulated), and there "
            f"are {_hours(have)}; ask for more, or for {jobs - 1} requeues",
        )
    elif total.high > have:
        yield _warning(
            "walltime",
            f"the steps take {_hours(total.value)} by the prediction (simulated), perhaps "
            f"{_hours(total.high)}, and there are {_hours(have)}",
        )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h"
