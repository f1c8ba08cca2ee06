"""A replica that a sweep has asked to time its steps. `distribute` makes it, and nobody else.

Its steps are those of any replica; only the calls that make a step are timed on their way in and
out. A script that no sweep has started has nothing of this in it.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.optim import label_of
from hpctrain.replica.observing import ObservedReplica
from hpctrain.replica.outcome import Step
from hpctrain.replica.step_clock import StepClock, StepTime
from hpctrain.replica.step_report import RankTimes, summarize
from hpctrain.world import roll_call

if TYPE_CHECKING:
    from hpctrain.fusion import Arrived
    from hpctrain.world import Asked

__all__ = ["TimedReplica"]

_MEET_S = 600.0
_MOST_STEPS = 100_000


class TimedReplica(ObservedReplica):
    """Times steps, reports them at the end, and ends the script when enough were seen."""

    _asked: Asked
    _clock: StepClock
    _times: list[StepTime]
    _counts: dict[str, int]
    _reported: bool

    def attend(self, asked: Asked) -> None:
        """Begin to time; what is reported at the latest when the world ends.

        On a GPU the clock waits for the device at every phase, or it would time the queueing.
        """
        device = self.world.device
        wait = torch.cuda.synchronize if device.type == "cuda" else None
        self._asked = asked
        self._clock = StepClock(settle=wait)
        self._times, self._reported = [], False
        self._num_seen = 0
        self._counts = self.counts()
        self.world.at_exit(self._report)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """As `Replica.__call__`; without gradients it is an evaluation, which no step counts."""
        if torch.is_grad_enabled():
            self._clock.begin("forward")
        else:
            self._clock.spoil()
        return super().__call__(*arguments, **named)

    def backward(
        self,
        loss: Tensor,
        *,
        num_samples: int | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """As `Replica.backward`."""
        self._clock.begin("backward")
        self._clock.count(num_samples)
        super().backward(
            loss, num_samples=num_samples, retain_graph=retain_graph, create_graph=create_graph
        )
        self._clock.pause()

    def _begin_plain(self) -> None:
        if not self._passes.is_open:
            self._clock.begin("backward")
            self._clock.count(None)
        super()._begin_plain()

    def _end_plain(self) -> None:
        super()._end_plain()
        self._clock.pause()

    def _begin_update(self) -> None:
        self._clock.begin("update")

    def _count_step(self) -> None:
        super()._count_step()
        self._note(self._clock.finish())

    def _exchange(self, *, present: bool = True) -> Arrived:
        around = self._clock.begin("exchange")
        arrived = super()._exchange(present=present)
        self._clock.pause()
        if around is not None:
            self._clock.begin(around)
        return arrived

    def step(self, *, flush: bool = False) -> Step:
        """As `Replica.step`; after as many as the sweep wants, the script ends on all ranks.

        Raises:
            SystemExit: with code 0, on all ranks in the same step.
        """
        self._clock.begin("update")
        done = super().step(flush=flush)
        self._clock.pause()
        if done.due:
            self._note(self._clock.finish())
        return done

    def _note(self, taken: StepTime | None) -> None:
        self._num_seen += 1
        asked = self._asked
        if self._num_seen == asked.warmup:
            self._counts = self.counts()
        if taken is not None and self._num_seen > asked.warmup and len(self._times) < _MOST_STEPS:
            self._times.append(taken)
        # Ranks in `join` may make different numbers of steps: they cannot leave in the middle.
        if asked.steps and self._num_seen == asked.warmup + asked.steps and not self._joining:
            self._report()
            raise SystemExit(0)

    def _report(self) -> None:
        """Collective, once: gather what all ranks have timed; rank 0 writes it down."""
        if self._reported:
            return
        self._reported = True
        world = self.world
        roll_call(world.comm, "reporting to hpctrain bench", timeout_s=_MEET_S)
        mine = RankTimes(
            steps=tuple(self._times),
            memory_bytes=_peak_memory(world.device),
            num_threads=torch.get_num_threads(),
        )
        everyone = world.comm.gather(mine, root=0)
        if everyone is None:
            return
        counts = self.counts()
        timed = max(1, self._num_seen - self._asked.warmup)
        gained = {name: (counts[name] - self._counts[name]) / timed for name in counts}
        report = summarize(everyone) | {
            "num_nodes": world.num_nodes,
            "engine": self.engine.name,
            "device": str(world.ranks[0].device),
            "mpi": world.mpi,
            "reads": sorted(world.bench.reads),
            "global_batch": world.bench.batch,
            "counts": {**gained, "bytes": counts["bytes"]},
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
            "optimizer": label_of(self.optimizer),
            "is_fused": any(group.get("fused") for group in self.optimizer.param_groups),
            "replica": self._mode.describe(),
        }
        path = Path(self._asked.report)
        fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
        fresh.write_text(json.dumps(report), encoding="utf-8")
        fresh.replace(path)


def _peak_memory(device: torch.device) -> int:
    """The most this rank has had: of a GPU, or of the process; shared pages count on each rank."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
