"""What a run used of the nodes it had: cores, memory, GPUs; `hpctrain job efficiency` shows it."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from hpctrain.world import World, parse_cpus

__all__ = ["RankUse", "add_up", "cpu_seconds", "measure_use", "memory_limit"]


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
    """What tells its GPU from others; None without one."""
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
