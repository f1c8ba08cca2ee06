"""Cores and threads: how many threads a rank may use, and which cores it should stay on.

The rules are pure; reading the machine and binding are small functions at the end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

__all__ = [
    "CoreMap",
    "bind_process",
    "choose_cores",
    "parse_cpus",
    "read_affinity",
    "read_core_map",
    "share_of_cores",
]

_SYSFS = Path("/sys/devices/system")


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreMap:
    """The CPUs of a node: which physical core each belongs to, and which NUMA domain."""

    core_of: Mapping[int, int]
    """CPU number -> lowest CPU number of the same physical core."""
    domain_of: Mapping[int, int]
    """CPU number -> NUMA domain."""

    @property
    def num_domains(self) -> int:
        """How many NUMA domains have CPUs."""
        return len(set(self.domain_of.values())) or 1


def parse_cpus(text: str) -> frozenset[int]:
    """Read a kernel list of CPUs: `0-3,8` becomes {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def share_of_cores(masks: Sequence[frozenset[int]], index: int, core_of: Mapping[int, int]) -> int:
    """Count the physical cores that rank `index` of a node may call its own, at least one.

    Each core is divided among the ranks whose affinity mask holds it, so ranks that share one mask
    share its cores evenly, and ranks bound apart keep all of theirs.

    Args:
        masks: The affinity mask of every rank on the node, in order of local rank.
        index: Which of them.
        core_of: CPU -> physical core; hardware threads of one core count once.
    """
    cores = [{core_of.get(cpu, cpu) for cpu in mask} for mask in masks]
    users = Counter(core for own in cores for core in own)
    return max(1, int(sum(Fraction(1, users[core]) for core in cores[index])))


def choose_cores(
    allowed: frozenset[int], local_size: int, core_map: CoreMap
) -> list[frozenset[int]]:
    """Divide a node's CPUs among its ranks: whole physical cores, domain by domain.

    Cores are lined up by NUMA domain and cut into `local_size` even runs. With more ranks than
    cores the ranks take turns on the cores.

    Returns:
        For each local rank the CPUs it should run on; never empty.
    """
    siblings: dict[int, set[int]] = {}
    for cpu in allowed:
        siblings.setdefault(core_map.core_of.get(cpu, cpu), set()).add(cpu)
    line = sorted(siblings, key=lambda core: (core_map.domain_of.get(core, 0), core))
    if local_size >= len(line):
        return [frozenset(siblings[line[i % len(line)]]) for i in range(local_size)]
    cuts = [i * len(line) // local_size for i in range(local_size + 1)]
    return [frozenset().union(*(siblings[core] for core in line[a:b])) for a, b in pairwise(cuts)]


def read_affinity() -> frozenset[int]:
    """Tell which CPUs this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def read_core_map() -> CoreMap:
    """Read cores and NUMA domains from the kernel; if it provides nothing, each CPU is a core."""
    core_of: dict[int, int] = {}
    for path in _SYSFS.glob("cpu/cpu[0-9]*/topology/thread_siblings_list"):
        cpu = int(path.parts[-3].removeprefix("cpu"))
        core_of[cpu] = min(parse_cpus(path.read_text()), default=cpu)
    domain_of: dict[int, int] = {}
    for path in _SYSFS.glob("node/node[0-9]*/cpulist"):
        domain = int(path.parts[-2].removeprefix("node"))
        domain_of.update(dict.fromkeys(parse_cpus(path.read_text()), domain))
    return CoreMap(core_of=core_of, domain_of=domain_of)


def bind_process(cpus: frozenset[int]) -> None:
    """Bind every thread of this process: MPI and OpenMP may have started some already."""
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cpus)
        except ProcessLookupError:
            continue  # a thread that ended meanwhile needs no core
