"""What is measured: times of steps, figures over all ranks, what the run used of its nodes."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from hpctrain.errors import ConfigError, NonFiniteError
from hpctrain.faults import Sentinel
from hpctrain.log import name_ranks
from hpctrain.replica import Replica, Step
from hpctrain.train.config import Faults
from hpctrain.world import PHASES, World, agree, parse_cpus

__all__ = [
    "Figures",
    "Guard",
    "Interval",
    "RankUse",
    "StepTimer",
    "add_up",
    "cpu_seconds",
    "describe_steps",
    "measure_use",
    "memory_limit",
    "summarise",
    "time_steps",
]


class StepTimer:
    """An observer that adds up the time of each phase; see `hpctrain.world`.

    On a GPU it waits for the device at each border, so that the times are those of the work and not
    of launching it; that takes away what would overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type == "cuda"
        self._device = device
        self._open: list[tuple[str, float]] = []
        self._sums = dict.fromkeys(PHASES, 0.0)

    def begin(self, name: str) -> None:
        """A phase begins; the one around it pauses."""
        now = self._now()
        if self._open:
            outer, since = self._open[-1]
            self._sums[outer] = self._sums.get(outer, 0.0) + now - since
        self._open.append((name, now))

    def end(self, name: str) -> None:
        """A phase ends; the one around it continues."""
        now = self._now()
        inner, since = self._open.pop()
        self._sums[inner] = self._sums.get(inner, 0.0) + now - since
        if self._open:
            self._open[-1] = (self._open[-1][0], now)

    def stepped(self, number: int) -> None:
        """Steps are counted elsewhere."""

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        sums, self._sums = self._sums, dict.fromkeys(PHASES, 0.0)
        return {f"{name}_s": sums[name] for name in PHASES}

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def time_steps(world: World) -> StepTimer:
    """Measure the phases of steps from now on; call it before `distribute` and `Loader`."""
    timer = StepTimer(world.device)
    world.observers.append(timer)
    return timer


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What all ranks know of an interval."""

    numbers: dict[str, float]
    """Means over the samples of all ranks in the last batch, NaN where there were none."""
    step_s: float
    samples_per_s: float
    split: dict[str, float]
    """Seconds of each phase per step, on average over ranks; empty if not measured."""
    slowest: tuple[int, float] | None
    """The rank that worked longest, and its time relative to the median."""
    nonfinite: dict[str, list[int]]
    """Numbers that were inf or NaN, and on which ranks."""


class Interval:
    """What one rank has seen since the last line.

    Args:
        timer: Measures the phases of steps; None where they are not measured.
    """

    def __init__(self, timer: StepTimer | None) -> None:
        self._timer = timer
        self._numbers: dict[str, Any] = {}
        self._weight = 0
        self._num_steps = 0
        self._num_samples = 0
        self._busy_s = 0.0

    def saw(self, numbers: Mapping[str, Any], *, num_samples: int, global_samples: int) -> None:
        """A batch: its figures stay on the device until they are read."""
        self._numbers, self._weight = dict(numbers), num_samples
        self._num_samples += global_samples

    def stepped(self, took_s: float) -> None:
        """A step took this many seconds."""
        self._num_steps += 1
        self._busy_s += took_s

    def close(self, world: World) -> Figures:
        """Collective: the figures of all ranks; the names of numbers must match.

        Raises:
            ConfigError: on all ranks, when a value is not a number, or names differ.
        """
        steps = max(1, self._num_steps)
        split = {} if self._timer is None else self._timer.take()
        names, values, trouble = _read(self._numbers, empty=self._weight == 0)
        agree(world.comm, trouble, error=ConfigError)
        mine = [float(self._weight), self._busy_s / steps, *(s / steps for s in split.values())]
        told = world.comm.allgather((names, [*values], mine))
        known = next((names for names, _, mine in told if mine[0] > 0), names)
        odd = [rank for rank, (n, _, m) in enumerate(told) if m[0] > 0 and n != known]
        if odd:
            raise ConfigError(
                f"the step function returned {', '.join(told[odd[0]][0])} on rank {odd[0]} and "
                f"{', '.join(known)} elsewhere; return the same names on all ranks"
            )
        rows = [values if m[0] > 0 else [0.0] * len(known) for _, values, m in told]
        figures = summarise(
            known,
            np.asarray(rows, dtype=np.float64).reshape(world.size, len(known)),
            np.asarray([m for _, _, m in told], dtype=np.float64),
            phases=tuple(split),
            samples_a_step=self._num_samples / steps,
        )
        self._num_steps, self._num_samples, self._busy_s = 0, 0, 0.0
        return figures


def summarise(
    names: list[str],
    values: np.ndarray,
    told: np.ndarray,
    *,
    phases: tuple[str, ...],
    samples_a_step: float,
) -> Figures:
    """Put the figures of all ranks together. Pure.

    Args:
        names: Of the numbers.
        values: By rank and name.
        told: By rank: samples in the last batch, seconds a step, seconds of each phase.
        phases: Names of the phases.
        samples_a_step: Over all ranks.
    """
    weights, step_s = told[:, 0], float(told[:, 1].max())
    total = weights.sum()
    with np.errstate(invalid="ignore"):  # of NaN and inf: they are reported by rank
        means = (values * weights[:, None]).sum(0) / total if total else values.sum(0) * np.nan
    wrong = {
        name: np.nonzero(~np.isfinite(values[:, place]))[0].tolist()
        for place, name in enumerate(names)
    }
    slowest = None
    split = dict(zip(phases, told[:, 2:].mean(0).tolist(), strict=True))
    if phases and len(told) > 1:
        waits = [place for place, name in enumerate(phases) if name == "exchange_s"]
        own = told[:, 2:].sum(1) - sum(told[:, 2 + place] for place in waits)
        rank, middle = int(own.argmax()), median(own.tolist())
        slowest = (rank, float(own[rank] / middle)) if middle > 0 else None
    return Figures(
        numbers=dict(zip(names, means.tolist(), strict=True)),
        step_s=step_s,
        samples_per_s=samples_a_step / step_s if step_s > 0 else 0.0,
        split=split,
        slowest=slowest,
        nonfinite={name: ranks for name, ranks in wrong.items() if ranks},
    )


def describe_steps(steps: Mapping[str, Step]) -> dict[str, float]:
    """Learning rates and gradient norms of a step, by name. Waits for the device.

    `lr` is the rate of the first parameter group; `lr_1` is that of the second where it is another
    one, and so on. `grad_norm` is the norm of the averaged gradients before clipping. Where there
    are several replicas their names come first, as in `critic.lr`.

    Args:
        steps: What each replica's last step did.
    """
    numbers: dict[str, float] = {}
    for name, done in steps.items():
        prefix = "" if len(steps) == 1 else f"{name}."
        rates = [float(rate) for rate in done.learning_rates]
        for group, rate in enumerate(rates):
            if group == 0 or rate != rates[0]:
                numbers[f"{prefix}lr_{group}" if group else f"{prefix}lr"] = rate
        norm = done.norm
        if norm is not None:
            numbers[f"{prefix}grad_norm"] = norm
    return numbers


def _read(numbers: Mapping[str, Any], *, empty: bool) -> tuple[list[str], list[float], str | None]:
    """Plain numbers by name; waits for the device."""
    names, values = list(numbers), []
    if empty:  # the loss of no samples is undefined
        return names, [0.0] * len(names), None
    for name, value in numbers.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            values.append(float(value.detach()))
        elif isinstance(value, int | float):
            values.append(float(value))
        else:
            kind = type(value).__name__
            return names, [], f"the step function returned {name}, a {kind}; return one number"
    return names, values, None


class Guard:
    """Collective: ends a run that goes wrong, with the rank; the faults section must match.

    Args:
        world: The ranks.
        replicas: Whose weights must stay equal.
        faults: How often to compare them, and what to do about NaN.
    """

    def __init__(self, world: World, replicas: Iterable[Replica], faults: Faults) -> None:
        every = faults.sentinel_every_steps
        self._every = every
        self._sentinels = [
            Sentinel(world, r.model, every=every, timeout_s=world.watching.timeout_s)
            for r in replicas
            if every
        ]
        self._stops = faults.nonfinite == "stop"
        for replica in replicas:  # what is logged is looked at here, the loss included
            replica.stops_at_nonfinite = False
        self._size = world.size

    def step(self, step: int) -> None:
        """Collective: compare the weights of all ranks, when it is time.

        Raises:
            DriftError: on all ranks; with the parameter, the ranks and the step.
        """
        if self._every and step % self._every == 0:
            for sentinel in self._sentinels:
                sentinel.compare(step=step)

    def look(self, figures: Figures, *, step: int) -> None:
        """Refuse numbers that are not finite; all ranks have the same ones.

        Raises:
            NonFiniteError: on all ranks; with the number, the ranks and the step.
        """
        for name, ranks in figures.nonfinite.items() if self._stops else ():
            raise NonFiniteError(
                f"{name} was inf or NaN at step {step} on {name_ranks(ranks)} of "
                f"{self._size}; check the learning rate, the data of those ranks and "
                'train.loss, or continue with faults.nonfinite="ignore"'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUse:
    """What one rank had and used."""

    node_rank: int
    cpus: frozenset[int]
    """Processors of its node that it may run on."""
    cpu_s: float
    memory_bytes: int
    """The most it had, pages that it shares with others included."""
    memory_limit: int
    """Of its node, or of the job there."""
    gpu: str | None = None
    """Identifies its GPU; None without one."""
    gpu_memory_bytes: int = 0
    gpu_memory_limit: int = 0


def cpu_seconds() -> float:
    """Processor time of this process, its threads and the workers it has started, so far."""
    process = psutil.Process()
    times = process.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in process.children(recursive=True):
        try:
            own = child.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += own.user + own.system
    return float(total)


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process may have: those of the machine, or of its control groups if less.

    Args:
        root: Where /proc and /sys are.
    """
    limits = [psutil.virtual_memory().total]
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / "sys/fs/cgroup" / controllers
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            own = base / path.lstrip("/")
            groups = [own, *own.parents]
            for group in groups[: groups.index(base) + 1]:
                limits += _read_limit(group / name)
    return min(limits)


def _read_limit(path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []


def add_up(ranks: Sequence[RankUse], *, seconds: float) -> dict[str, Any]:
    """All ranks together, with the names that `hpctrain job efficiency` reads. Pure."""
    cpus: dict[int, set[int]] = {}
    limits: dict[int, int] = {}
    for rank in ranks:
        cpus.setdefault(rank.node_rank, set()).update(rank.cpus)
        limits[rank.node_rank] = rank.memory_limit
    used: dict[str, Any] = {
        "cores": sum(len(each) for each in cpus.values()),
        "busy_cores": sum(rank.cpu_s for rank in ranks) / seconds if seconds > 0 else None,
        "memory_bytes": sum(limits.values()),
        "used_memory_bytes": sum(rank.memory_bytes for rank in ranks),
    }
    gpus = {(rank.node_rank, rank.gpu) for rank in ranks if rank.gpu is not None}
    if gpus:
        used |= {
            "gpus": len(gpus),
            "gpu_memory_bytes": min(r.gpu_memory_limit for r in ranks if r.gpu is not None),
            "used_gpu_memory_bytes": max(rank.gpu_memory_bytes for rank in ranks),
        }
    return used


def measure_use(world: World, *, cpu_s: float, seconds: float) -> dict[str, Any]:
    """Collective: what all ranks used; the same on all of them.

    Args:
        world: The ranks.
        cpu_s: Processor time of this rank in the time that counts.
        seconds: That time.
    """
    info = world.ranks[world.rank]
    mine = RankUse(
        node_rank=world.node_rank,
        cpus=parse_cpus(info.cpus),
        cpu_s=cpu_s,
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        memory_limit=memory_limit(),
        **_gpu_use(world),
    )
    everyone, longest = zip(*world.comm.allgather((mine, seconds)), strict=True)
    return add_up(everyone, seconds=max(longest))


def _gpu_use(world: World) -> dict[str, Any]:
    if world.device.type != "cuda":
        return {}
    info = world.ranks[world.rank].device
    _, total = torch.cuda.mem_get_info(world.device)
    return {
        "gpu": info.uuid or f"{info.kind}:{info.index}",
        "gpu_memory_bytes": torch.cuda.max_memory_reserved(world.device),
        "gpu_memory_limit": total,
    }
