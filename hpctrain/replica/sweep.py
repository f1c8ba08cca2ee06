"""The step times that a script reports to a sweep (`hpctrain bench`).

A timer observes one replica, told what begins and ends; a script that no sweep has started has no
timer. All of a step's time belongs to some phase here, as a sweep needs it; the trainer's timer
adds up what was observed, since a training also evaluates, saves and logs between its steps.

| phase | from | to |
| --- | --- | --- |
| input | the end of a step, or of a backward pass that accumulates | the next forward |
| forward | `replica(x)` | `replica.backward(loss)`, the loss included |
| backward | `replica.backward(loss)` | the gradients of this rank are there |
| exchange | that moment | the average over all ranks is there, clipped: not hidden |
| update | the end of the exchange | the end of `replica.step()` |
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import torch

from hpctrain.atomic import write_atomically
from hpctrain.optim import label_of
from hpctrain.world import PHASES, roll_call

if TYPE_CHECKING:
    from hpctrain.replica.replica import Replica
    from hpctrain.sweep_request import Bench

__all__ = ["RankTimes", "StepClock", "StepTime", "SweepTimer", "summarize"]

_MEET_S = 600.0
_MOST_STEPS = 100_000

# The phase that unclaimed time belongs to, by the phase that follows.
_BEFORE = {"forward": "input", "backward": "forward", "update": "update", "exchange": "update"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One step of one rank."""

    step_s: float
    split_s: dict[str, float]
    """By phase; sums to `step_s`."""
    num_samples: int | None
    """Of this rank; None if the script did not pass it."""
    sees_forward: bool
    """Whether the model was called through the replica; otherwise input is part of forward."""


class StepClock:
    """Told what begins, it adds up what each phase took.

    Args:
        now: The time in seconds.
        synchronize: Waits for a device before the time is read.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._now = now
        self._synchronize = synchronize
        self._last = now()
        self._phase: str | None = None  # None: whose time it is will be seen
        self._split = dict.fromkeys(PHASES, 0.0)
        self._samples: int | None = 0
        self._sees_forward = False
        self._spoilt = True  # building and compiling come before the first step

    def begin(self, phase: str) -> str | None:
        """A phase begins; the previous one ends, and is reported."""
        before = self._phase
        self._charge(before or _BEFORE[phase])
        self._phase = phase
        self._sees_forward = self._sees_forward or phase == "forward"
        return before

    def pause(self) -> None:
        """A phase ends, and what follows is not known yet."""
        if self._phase is not None:
            self._charge(self._phase)
            self._phase = None

    def count(self, num_samples: int | None) -> None:
        """Samples of a backward pass."""
        if num_samples is None or self._samples is None:
            self._samples = None
        else:
            self._samples += num_samples

    def spoil(self) -> None:
        """This step contains something else, such as an evaluation, and does not count."""
        self._spoilt = True

    def finish(self) -> StepTime | None:
        """A step has ended; None where it does not count."""
        self.pause()
        total = sum(self._split.values())
        done = StepTime(
            step_s=total,
            split_s=self._split,
            num_samples=self._samples,
            sees_forward=self._sees_forward,
        )
        spoilt, self._spoilt = self._spoilt, False
        self._split = dict.fromkeys(PHASES, 0.0)
        self._samples, self._sees_forward = 0, False
        return None if spoilt else done

    def _charge(self, phase: str) -> None:
        if self._synchronize is not None:
            self._synchronize()
        now = self._now()
        self._split[phase] += now - self._last
        self._last = now


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
    the time nor the samples of a step would be those of any requested batch.
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


class SweepTimer:
    """An observer of one replica that times its steps, and reports them at the end of the world.

    On a GPU the clock waits for the device at every phase, or it would time the queueing.
    """

    def __init__(self, replica: Replica, sweep: Bench) -> None:
        self._replica = replica
        self._sweep, self._asked = sweep, sweep.asked
        wait = torch.cuda.synchronize if replica.world.device.type == "cuda" else None
        self._clock = StepClock(synchronize=wait)
        self._open: list[str] = []
        self._times: list[StepTime] = []
        self._num_seen = 0
        self._counts = replica.counts()
        self._has_reported = False
        replica.observe(self)
        replica.world.at_exit(self._report)

    def begin(self, name: str) -> None:
        """A phase begins. A forward without gradients is an evaluation, which no step counts."""
        self._open.append(name)
        if name == "backward":
            self._clock.count(self._replica.num_samples)
        if name == "forward" and not torch.is_grad_enabled():
            self._clock.spoil()
        else:
            self._clock.begin(name)

    def end(self, name: str) -> None:
        """A phase ends, and the one around it continues; the loss belongs to forward."""
        self._open.pop()
        if name != "forward":
            self._clock.pause()
            if self._open:
                self._clock.begin(self._open[-1])

    def stepped(self, number: int) -> None:
        """A step has ended; after as many as the sweep requires, the script ends on all ranks.

        Raises:
            SystemExit: with code 0, on all ranks in the same step.
        """
        taken = self._clock.finish()
        self._num_seen += 1
        asked = self._asked
        if self._num_seen == asked.warmup:
            self._counts = self._replica.counts()
        if taken is not None and self._num_seen > asked.warmup and len(self._times) < _MOST_STEPS:
            self._times.append(taken)
        is_enough = asked.steps and self._num_seen == asked.warmup + asked.steps
        # Ranks in `join` may make different numbers of steps: they cannot leave in the middle.
        if is_enough and not self._replica.is_joining:
            self._report()
            raise SystemExit(0)

    def _report(self) -> None:
        """Collective, once: gather what all ranks have timed; rank 0 writes it down."""
        if self._has_reported:
            return
        self._has_reported = True
        replica, world = self._replica, self._replica.world
        roll_call(world.comm, "reporting to hpctrain bench", timeout_s=_MEET_S)
        mine = RankTimes(
            steps=tuple(self._times),
            memory_bytes=_peak_memory(world.device),
            num_threads=torch.get_num_threads(),
        )
        everyone = world.comm.gather(mine, root=0)
        if everyone is None:
            return
        counts = replica.counts()
        timed = max(1, self._num_seen - self._asked.warmup)
        gained = {name: (counts[name] - self._counts[name]) / timed for name in counts}
        report = summarize(everyone) | {
            "num_nodes": world.num_nodes,
            "engine": replica.engine.name,
            "device": str(world.ranks[0].device),
            "mpi": world.mpi,
            "reads": sorted(self._sweep.reads),
            "global_batch": self._sweep.batch,
            "counts": {**gained, "bytes": counts["bytes"]},
            "num_parameters": sum(p.numel() for p in replica.model.parameters()),
            "optimizer": label_of(replica.optimizer),
            "is_fused": any(group.get("fused") for group in replica.optimizer.param_groups),
            "replica": replica.describe_mode(),
        }
        write_atomically(Path(self._asked.report), json.dumps(report))


def _peak_memory(device: torch.device) -> int:
    """The most this rank has had: of a GPU, or of the process; shared pages count on each rank."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
