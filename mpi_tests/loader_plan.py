"""What the loader's own plan gives each rank, for comparing with what others compute of it."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.data import Seat, plan_parts
from hpctrain.predict.rehearsal import TrainingRun

__all__ = ["samples_of"]


def samples_of(training: TrainingRun, *, rank: int, num_ranks: int) -> Iterator[int]:
    """How many samples a rank has in each batch of an epoch."""
    parts = plan_parts(
        training.batching,
        Seat(rank=rank, num_ranks=num_ranks),
        lambda positions: positions,
        start=0,
        num_samples=training.num_samples,
    )
    for part, _ in parts:
        yield part.num_samples
