"""A job on N virtual ranks in one process, without training: its arithmetic. Pure.

Batches, shares and the checkpoint's parts come from the very functions that real ranks use, called
for each virtual rank; nothing is estimated there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.checkpoint.layout import Item, choose_ranks, divide
from hpctrain.data import Batching, Seat, cyclic, plan_parts
from hpctrain.predict.checks import count_of, number_of
from hpctrain.predict.collectives import Layout

__all__ = ["Files", "Holding", "Loading", "Share", "State", "Training", "samples_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is trained on: samples and batches, as the configuration has them."""

    num_samples: int
    global_batch: int
    """Samples of a step over all ranks, its parts together."""
    accumulate: int = 1
    """Parts that a step is computed in."""
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
    """What backward needs beside the model; 0: not said, and not in any estimate."""

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
    def of(cls, training: Training, num_ranks: int) -> Loading:
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


def samples_of(training: Training, *, rank: int, num_ranks: int) -> Iterator[int]:
    """How many samples a rank has in each batch of an epoch, from the loader's own plan."""
    parts = plan_parts(
        training.batching,
        Seat(rank=rank, num_ranks=num_ranks),
        lambda positions: positions,
        start=0,
        num_samples=training.num_samples,
    )
    for part, _ in parts:
        yield part.num_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Bytes in memory; activations are in them only where they were given."""

    per_rank: int
    per_node: int
    on_device: bool
    """Whether ranks hold it on a GPU each; otherwise the node's memory has it all."""

    @classmethod
    def of(cls, state: State, layout: Layout, *, rank_batch: int, on_device: bool) -> Holding:
        """What docs/node.md says of shared memory; elsewhere each rank has everything."""
        size, copies = state.weight_bytes, int(state.state_copies * state.weight_bytes)
        active = state.activation_bytes_per_sample * rank_batch
        ranks = layout.local_ranks
        if on_device or ranks == 1:
            own = 2 * size + copies + active
            return cls(per_rank=own, per_node=own * ranks, on_device=on_device)
        own = 2 * size + active
        shared = 2 * size + copies  # the sums, the new weights on their way, and the state
        return cls(per_rank=own, per_node=own * ranks + shared, on_device=False)


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
    def of(cls, state: State, layout: Layout) -> Files:
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
