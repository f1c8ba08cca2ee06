"""Which samples the final weights have seen: attempts, stitched where each went on from. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["AttemptLog", "check_samples", "stitch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptLog:
    """What the ranks of one attempt have written down."""

    from_step: int
    """The step of the checkpoint that it went on from; 0: it began anew."""
    steps: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """The epoch and the samples, over all ranks, of each step."""


def stitch(attempts: Sequence[AttemptLog]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """The steps that the last attempt's weights are made of: later ones were lost, and made again.

    Args:
        attempts: In the order in which they ran; those that never began to train are left out.
    """
    lineage: dict[int, tuple[int, tuple[int, ...]]] = {}
    for attempt in attempts:
        lineage = {step: done for step, done in lineage.items() if step <= attempt.from_step}
        lineage.update(attempt.steps)
    return lineage


def check_samples(
    lineage: Mapping[int, tuple[int, tuple[int, ...]]],
    *,
    num_steps: int,
    num_epochs: int,
    num_samples: int,
) -> list[str]:
    """What is wrong with a lineage; empty: every sample of every epoch exactly once."""
    wrong = []
    missing = [step for step in range(1, num_steps + 1) if step not in lineage]
    if missing or len(lineage) != num_steps:
        wrong.append(f"{len(lineage)} steps instead of {num_steps}, without {missing[:5]}")
    seen: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(num_epochs)}
    for epoch, samples in lineage.values():
        seen.setdefault(epoch, Counter()).update(samples)
    for epoch, counts in seen.items():
        absent = sum(1 for sample in range(num_samples) if counts[sample] == 0)
        again = sum(1 for count in counts.values() if count > 1)
        strange = len(set(counts) - set(range(num_samples)))
        if absent or again or strange or epoch >= num_epochs:
            wrong.append(f"epoch {epoch}: {absent} samples absent, {again} more than once")
    return wrong
