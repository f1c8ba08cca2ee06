"""A rank's side of `data`: batches of arrays, by torch's DataLoader and by hpctrain's Loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import hpctrain as hpc
from hpctrain.bench import Measurable
from hpctrain.world import World

__all__ = ["make_maker"]

_BATCH = 64
# Not a multiple of anything, as real data sets are: torch fills up with duplicates.
_SAMPLES = {64: 50_001, 3072: 8_001}
_STEP_S = 0.010


class Batches:
    """Batches without end, epoch after epoch."""

    def __init__(self, world: World, kind: str) -> None:
        self.world = world
        self.kind = kind

    def prepare(self, case: str) -> dict[str, object]:
        """Make the data and the loader; nothing is known beforehand."""
        width = int(case.split()[0])
        rows = _SAMPLES[width]
        generator = torch.Generator().manual_seed(1)
        self.data = torch.rand(rows, width, generator=generator), torch.arange(rows)
        self.loader = self._make_loader()
        self.batches = self._endless()
        return {}

    def _make_loader(self) -> Any:
        world, size = self.world, _BATCH * self.world.size
        if self.kind == "loader":
            return hpc.Loader(world, self.data, global_batch=size)
        if self.kind == "loader-keyed":
            return hpc.Loader(world, self.data, global_batch=size, shuffle="keyed")
        if self.kind == "loader-thread":
            return hpc.Loader(world, self.data, global_batch=size, prefetch=2)
        data = TensorDataset(*self.data)
        sampler: Any = DistributedSampler(data, num_replicas=world.size, rank=world.rank)
        if self.kind == "dataloader":
            return DataLoader(data, batch_size=_BATCH, sampler=sampler)
        # Batched indexing: one gather for a batch, no sample by sample, no collation.
        return DataLoader(data, batch_size=None, sampler=BatchSampler(sampler, _BATCH, False))

    def _endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            if isinstance(self.loader, DataLoader):
                sampler: Any = self.loader.sampler
                getattr(sampler, "sampler", sampler).set_epoch(epoch)
            yield from self.loader
            epoch += 1

    def run(self, repeats: int) -> None:
        """Take batches."""
        for _ in islice(self.batches, repeats):
            pass

    def counts(self) -> dict[str, int]:
        """Nothing: one repeat is one batch."""
        return {}

    def finish(self) -> dict[str, object]:
        """Collective: how many samples an epoch hands out, and how many different ones."""
        self.batches.close()  # type: ignore[attr-defined]
        seen = torch.cat([labels for _, labels in self.loader])
        everyone = torch.cat(self.world.comm.allgather(seen))
        different = len(set(everyone.tolist()))
        outcome: dict[str, object] = {"handed out": len(everyone), "different": different}
        del self.data, self.loader, self.batches
        return outcome


class Steps:
    """10 ms of computation, after taking a batch or without one."""

    def __init__(self, world: World, kind: str | None, work: Callable[[], None]) -> None:
        self.world = world
        self.batches = None if kind is None else Batches(world, kind)
        self.work = work

    def prepare(self, case: str) -> dict[str, object]:
        """Make the data and the loader."""
        self.waits: list[float] = []
        return {} if self.batches is None else self.batches.prepare(case)

    def run(self, repeats: int) -> None:
        """Take steps, and time how long each waits for its batch."""
        for _ in range(repeats):
            started = time.perf_counter()
            if self.batches is not None:
                next(self.batches.batches)
            self.waits.append(time.perf_counter() - started)
            self.work()

    def counts(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def finish(self) -> dict[str, object]:
        """Collective: the wait as a share of 10 ms, of the rank that waits most."""
        share = 100 * median(self.waits) / _STEP_S, 100 * fmean(self.waits) / _STEP_S
        typical, mean = (max(part) for part in zip(*self.world.comm.allgather(share), strict=True))
        outcome = {} if self.batches is None else self.batches.finish()
        return {**outcome, "stall %": round(typical, 2), "stall % (mean)": round(mean, 2)}


def _calibrate(world: World) -> Callable[[], None]:
    """Collective: computation that takes 10 ms here, the same amount on all ranks."""
    weight = torch.randn(128, 128) / 128

    def work(repeats: int) -> None:
        x = weight
        for _ in range(repeats):
            x = torch.tanh(x @ weight)

    work(100)
    times = []
    for _ in range(15):
        started = time.perf_counter()
        work(100)
        times.append((time.perf_counter() - started) / 100)
    fastest = min(world.comm.allgather(min(times)))  # whatever disturbs makes it slower
    repeats = max(1, round(_STEP_S / fastest))
    return lambda: work(repeats)


def make_maker() -> Callable[[World, str], Measurable]:
    """What makes the subject of a variant; variants share the size of a step."""
    shared: list[Callable[[], None]] = []

    def make(world: World, variant: str) -> Measurable:
        if not variant.startswith("step"):
            return Batches(world, variant)
        if not shared:
            shared.append(_calibrate(world))
        kinds = {
            "step-dataloader": "dataloader",
            "step-tuned": "dataloader-tuned",
            "step-loader": "loader",
            "step-thread": "loader-thread",
        }
        return Steps(world, kinds.get(variant), shared[0])

    return make
