"""What the step times of all ranks say together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hpctrain.replica.step_clock import StepTime
from hpctrain.world import PHASES

__all__ = ["RankTimes", "summarize"]

_BUSY = ("input", "forward", "backward")  # what a rank does before it meets the others
_FULL_SHARE = 0.25  # an epoch has at most two smaller batches, so a full one is not rarer


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """What one rank has timed."""

    steps: tuple[StepTime, ...]
    memory_bytes: int
    num_threads: int


def summarize(ranks: Sequence[RankTimes]) -> dict[str, object]:
    """Steps as all ranks saw them, where their time went, and who held whom up.

    A step lasts as long as on its slowest rank. The split is the mean over ranks and over the
    middle half of the steps, so that its parts still add up. Straggling is how much later than the
    median rank the slowest one comes to the exchange: the median over steps.

    The last batches of an epoch may be smaller than the others. Their steps do not count: neither
    the time nor the samples of a step would be those of any batch that was asked for.
    """
    seen = min(len(rank.steps) for rank in ranks)
    steps = _full_batches([[rank.steps[i] for rank in ranks] for i in range(seen)])
    count = len(steps)  # each has one time a rank
    lengths = [max(each.step_s for each in step) for step in steps]
    middle = sorted(range(count), key=lengths.__getitem__)[count // 4 : count - count // 4]
    late = [_late([sum(each.split_s[phase] for phase in _BUSY) for each in s]) for s in steps]
    samples = [_total([each.num_samples for each in step]) for step in steps]
    return {
        "num_ranks": len(ranks),
        "num_threads": ranks[0].num_threads,
        "step_s": lengths,
        "split_s": {
            phase: fmean(each.split_s[phase] for i in middle for each in steps[i])
            for phase in (PHASES if count else ())
        },
        "sees_forward": all(each.sees_forward for step in steps for each in step),
        "straggling_s": median(late) if late else 0.0,
        "samples_per_step": None if not samples or None in samples else fmean(_known(samples)),
        "memory_bytes": [rank.memory_bytes for rank in ranks],
    }


def _full_batches(steps: list[list[StepTime]]) -> list[list[StepTime]]:
    """The steps on the largest batch; all of them where batches have all kinds of sizes."""
    samples = [_total([each.num_samples for each in step]) for step in steps]
    if not samples or None in samples:
        return steps
    largest = max(_known(samples))
    full = [step for step, number in zip(steps, samples, strict=True) if number == largest]
    return full if len(full) >= _FULL_SHARE * len(steps) else steps


def _late(busy: Sequence[float]) -> float:
    return max(busy) - median(busy)


def _total(samples: Sequence[int | None]) -> int | None:
    return None if None in samples else sum(_known(samples))


def _known(samples: Sequence[int | None]) -> list[int]:
    return [number for number in samples if number is not None]
