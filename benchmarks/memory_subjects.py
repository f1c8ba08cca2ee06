"""A rank's side of `memory`: trains a model and weighs the node meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from benchmarks import step_subjects
from benchmarks.memory_parts import data_kib
from benchmarks.workloads import Workload
from hpctrain.bench import Measurable
from hpctrain.world import World

__all__ = ["make_maker"]

_STEPS = 3


class Weighed:
    """Trains by the way of another subject, and weighs the node after each part has come."""

    def __init__(
        self, world: World, way: step_subjects.Compute, models: Mapping[str, tuple[int, int]]
    ) -> None:
        self.world = world
        self.models = models
        self.way = way
        self.workload: Workload | None = None
        self.outcome: dict[str, object] = {}

    def prepare(self, case: str) -> dict[str, object]:
        """Train something small: what torch allocates once is there before anything is weighed."""
        self.workload = _workload(*self.models[case])
        small = _workload(1, 64)
        model = small.model()
        optimizer = small.optimizer(model)
        model(small.data(0, 1)[0]).sum().backward()
        optimizer.step()
        return {}

    def run(self, repeats: int) -> None:
        """Collective: build, train, weigh, and let go. Only the first time tells: see `finish`."""
        for _ in range(repeats):
            weighed = self._train()
            self.outcome = self.outcome or weighed
            self.way.release()

    def _train(self) -> dict[str, object]:
        way, workload = self.way, self.workload
        if workload is None:
            raise RuntimeError("prepare() comes first")
        marks = [self._weigh()]
        way.workload = workload
        torch.manual_seed(0)
        way.model = workload.model()
        model_bytes = sum(p.numel() * p.element_size() for p in way.model.parameters())
        marks.append(self._weigh())
        way.optimizer = workload.optimizer(way.model)
        way.x, way.y = workload.data(self.world.rank, self.world.size)
        way.distribute()
        for _ in range(_STEPS):
            way.backward()
            if len(marks) == 2:
                marks.append(self._weigh())
            way.step()
        marks.append(self._weigh())
        start, built, differentiated, end = marks
        parts = {
            "weights": built - start,
            "gradients": differentiated - built,
            "update": end - differentiated,
            "all": end - start,
        }
        return {"model_bytes": model_bytes, "pss_bytes": parts}

    def _weigh(self) -> int:
        """Collective: bytes of all ranks of the node, shared pages once; no garbage counts."""
        gc.collect()
        self.world.comm.Barrier()
        own = 1024 * data_kib(Path("/proc/self/smaps").read_text())
        total: int = self.world.comm.allreduce(own)
        return total

    def counts(self) -> dict[str, int]:
        """Nothing: what was weighed is an outcome."""
        return {}

    def finish(self) -> dict[str, object]:
        """What was weighed in the fresh process, where nothing freed was used again."""
        return self.outcome


def _workload(layers: int, width: int) -> Workload:
    return Workload(
        build=lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))),
        inputs=(width,),
        targets=(width,),
        batch=4,
        optimizer_class=torch.optim.AdamW,
        options={"lr": 1e-4, "fused": True},
    )


def make_maker(models: Mapping[str, tuple[int, int]]) -> Callable[[World, str], Measurable]:
    """What makes the subject of a variant: a kind and a number of ranks.

    Args:
        models: How many linear layers of which width, by the name of the case.
    """
    make = step_subjects.make_maker()

    def make_weighed(world: World, variant: str) -> Measurable:
        way = make(world, variant.rpartition("-")[0])
        if not isinstance(way, step_subjects.Compute):
            raise TypeError(f"{variant} does not train")
        return Weighed(world, way, models)

    return make_weighed
