"""Measure what a machine file is fitted from: a few collectives, and concurrent computing.

`measure` runs on all ranks of a launch; `measure_here` starts such launches on this machine for
each number of ranks: `python -m hpctrain.predict.measuring OUT ENGINES`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import psutil
import torch

import hpctrain as hpc
from hpctrain.bench import background_load, read_clocks
from hpctrain.engines import Engine, Op
from hpctrain.errors import CollectiveError, ConfigError, LaunchError
from hpctrain.predict.costs import expected_maximum
from hpctrain.predict.fit import (
    CollectiveSample,
    ComputeSample,
    Measurement,
    TrainingSample,
    fit_machine,
)
from hpctrain.predict.machine import Machine
from hpctrain.predict.profiling import Subject
from hpctrain.tables import count_of
from hpctrain.world import World, keep_freed_memory

__all__ = [
    "SIZES",
    "fit_here",
    "measure",
    "measure_collectives",
    "measure_compute",
    "measure_here",
    "measure_training",
]

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_SOME_BYTES = 16 << 20
_STEPS = 30
_WARMUP = 5
_LIMIT_S = 300.0


def measure(
    world: World,
    engines: Sequence[str] = ("mpi",),
    *,
    sizes: Sequence[int] = SIZES,
    subject: Subject | None = None,
) -> Measurement:
    """Collective: measure this launch; all ranks get the same.

    Args:
        world: The ranks.
        engines: Whose collectives; the same on every rank.
        sizes: Bytes of them; the same on every rank.
        subject: What to compute and to train; None: twenty layers of 512.
    """
    subject = subject or _standard_subject()
    if world.device.type == "cpu":
        keep_freed_memory()  # as training does
    compute = measure_compute(world, lambda: _step_alone(subject))
    samples: list[CollectiveSample] = []
    training: list[TrainingSample] = []
    if world.size > 1:
        for name in engines:
            connection = hpc.connect(world, name)
            samples += measure_collectives(world, connection.engine, sizes)
            training.append(measure_training(world, connection.engine, subject, compute))
            connection.close()
    memory = min(world.comm.allgather(psutil.virtual_memory().total))
    return Measurement(
        collectives=tuple(samples),
        compute=compute,
        training=tuple(training),
        memory_bytes_per_node=memory,
    )


def measure_collectives(
    world: World, engine: Engine, sizes: Sequence[int] = SIZES
) -> list[CollectiveSample]:
    """Collective: time allreduces of float32 the way that training takes.

    Where ranks share a node, gradients are in memory of the engine's own; elsewhere in torch's.
    """
    shares = max(world.comm.allgather(world.local_size)) > 1
    samples = []
    for size in sizes:
        count = max(1, size // 4)
        buffer = engine.allocate(count) if shares else torch.zeros(count, device=engine.device)
        buffer.fill_(1.0)
        engine.allreduce_(buffer, Op.SUM)
        if not bool((buffer == engine.size).all()):
            raise CollectiveError(f"{engine.name}: the sum of ones is wrong at {size} bytes")
        buffer.zero_()
        repeats = max(5, min(50, _SOME_BYTES // size))
        times = []
        for _ in range(repeats):
            world.comm.Barrier()
            start = time.perf_counter()
            engine.allreduce_(buffer, Op.SUM)
            times.append(time.perf_counter() - start)
        every = world.comm.allgather(times)
        slowest = [max(each) for each in zip(*every, strict=True)]
        samples.append(
            CollectiveSample(
                engine=engine.name,
                num_ranks=world.size,
                ranks_per_node=world.local_size,
                num_bytes=4 * buffer.numel(),
                seconds=median(slowest),
            )
        )
    return samples


def measure_compute(
    world: World, step: Callable[[], None], *, steps: int = _STEPS
) -> ComputeSample:
    """Collective: time the same step on all ranks at once; only its beginning is together."""
    for _ in range(_WARMUP):
        step()
    world.comm.Barrier()
    times = []
    for _ in range(count_of(steps, "steps")):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    every = [seconds for each in world.comm.allgather(times) for seconds in each]
    return ComputeSample(
        ranks_on_node=max(world.comm.allgather(world.local_size)),
        seconds=median(every),
        jitter=_jitter(every),
    )


def measure_training(
    world: World, engine: Engine, subject: Subject, compute: ComputeSample, *, steps: int = _STEPS
) -> TrainingSample:
    """Collective: time steps of all ranks together, as `distribute` takes them by default."""
    replica = hpc.distribute(world, subject.model, subject.optimizer, engine=engine)
    times = []
    for _ in range(_WARMUP + count_of(steps, "steps")):
        world.comm.Barrier()
        start = time.perf_counter()
        replica.backward(subject.loss(), num_samples=subject.batch)
        replica.step()
        times.append(time.perf_counter() - start)
    every = world.comm.allgather(times[_WARMUP:])
    replica.close()
    return TrainingSample(
        engine=engine.name,
        num_ranks=world.size,
        ranks_per_node=world.local_size,
        gradient_bytes=sum(p.numel() * p.element_size() for p in subject.model.parameters()),
        compute_s=compute.seconds,
        seconds=median(max(each) for each in zip(*every, strict=True)),
    )


def _step_alone(subject: Subject) -> None:
    subject.optimizer.zero_grad()
    torch.autograd.backward(subject.loss())
    subject.optimizer.step()


def _jitter(times: Sequence[float]) -> float:
    """The relative standard deviation of a normal distribution that is as slow where it counts.

    Ranks wait for the slowest of them, so the slow side counts: what the slowest of
    sixteen exceeds in every second step. Time lost to others has a longer tail than chance alone.
    """
    middle = median(times)
    slow = quantiles(times, n=1000, method="inclusive")[round(1000 * 0.5 ** (1 / 16)) - 1]
    return float((slow - middle) / middle / expected_maximum(16))


def _standard_subject() -> Subject:
    parts: list[torch.nn.Module] = []
    for _ in range(20):
        parts += [torch.nn.Linear(512, 512), torch.nn.ReLU()]
    model = torch.nn.Sequential(*parts)
    x = torch.randn(64, 512)
    return Subject(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        loss=lambda: model(x).square().mean(),
        batch=len(x),
    )


def measure_here(
    ranks: Sequence[int],
    engines: Sequence[str] = ("mpi",),
    *,
    repeats: int = 1,
    timeout_s: float = _LIMIT_S,
) -> list[Measurement]:
    """Start launches for each number of ranks on this machine, one after the other.

    All numbers take turns, so that a machine which drifts does so for all of them. How much of the
    machine others used meanwhile is in each measurement.

    Raises:
        ConfigError: 1 is not among the numbers, or there would be no launch.
        LaunchError: a launch failed or took too long; with what it said.
    """
    if 1 not in ranks:
        raise ConfigError(
            f"ranks={list(ranks)} must include 1: everything is relative to a single rank"
        )
    turns = range(count_of(repeats, "repeats"))
    return [_launch(count, engines, timeout_s) for _ in turns for count in ranks]


def _launch(num_ranks: int, engines: Sequence[str], timeout_s: float) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="hpctrain-fit-") as directory:
        out = Path(directory) / "measured.json"
        command = [sys.executable, "-m", "hpctrain", "run", "-n", str(num_ranks), "--quiet"]
        command += ["-m", __name__, str(out), ",".join(engines)]
        before = read_clocks()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"measuring {num_ranks} ranks took longer than {timeout_s:g} s"
            ) from error
        if done.returncode != 0:
            raise LaunchError(f"measuring {num_ranks} ranks failed:\n{done.stdout}{done.stderr}")
        load = background_load(before, read_clocks(), num_cores=os.cpu_count() or 1)
        said = Measurement.from_json(json.loads(out.read_text(encoding="utf-8")))
        return replace(said, foreign_load=round(load, 4))


def fit_here(
    ranks: Sequence[int],
    engines: Sequence[str] = ("mpi",),
    *,
    repeats: int = 1,
    title: str = "this machine",
) -> Machine:
    """Measure this machine at these numbers of ranks, and fit it: what `bench fit` writes."""
    return fit_machine(measure_here(ranks, engines, repeats=repeats), title=title)


def main(arguments: Sequence[str]) -> int:
    """Be one rank of a launch; rank 0 writes what was measured."""
    out, engines = arguments
    with hpc.init(bind="numa") as world:
        found = measure(world, engines.split(","))
        if world.rank == 0:
            Path(out).write_text(json.dumps(found.as_json()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
