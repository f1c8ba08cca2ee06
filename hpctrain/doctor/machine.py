"""Judges the machine: cores, shared memory, locked memory. Reading is apart from judging."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from hpctrain.doctor.verdict import Check
from hpctrain.log import format_bytes, format_ranges
from hpctrain.world import CoreMap

__all__ = [
    "judge_cores",
    "judge_memlock",
    "judge_shm",
    "parse_cpu_flags",
    "parse_quota",
    "read_cpu_flags",
    "read_infiniband",
    "read_memlock",
    "read_quota",
    "read_shm",
]

_MIB = 1 << 20
SHM_WANTED_BYTES = 512 * _MIB
SHM_FREE_WANTED_BYTES = 128 * _MIB


def judge_cores(
    affinity: frozenset[int],
    core_map: CoreMap,
    *,
    quota: float | None,
    omp_num_threads: str | None,
) -> Check:
    """How many cores may be used, and do threads and limits agree with that?

    Args:
        affinity: CPUs this process may run on.
        core_map: Cores and NUMA domains of the machine.
        quota: CPUs' worth of time that a container allows; None is unlimited.
        omp_num_threads: The variable's value.
    """
    name = "cores and threads"
    cpus = set(core_map.core_of) or set(affinity)
    allowed = {core_map.core_of.get(cpu, cpu) for cpu in affinity}
    total = {core_map.core_of.get(cpu, cpu) for cpu in cpus}
    domains = core_map.num_domains
    text = (
        f"{len(allowed)} of {len(total)} cores (CPUs {format_ranges(affinity, limit=8)}), "
        f"{domains} NUMA domain{'s' if domains > 1 else ''}, "
        f"OMP_NUM_THREADS {omp_num_threads or 'not set'}"
    )
    details = {
        "cpus": len(affinity),
        "cores": len(allowed),
        "cores_of_machine": len(total),
        "numa_domains": domains,
        "quota": quota,
        "OMP_NUM_THREADS": omp_num_threads,
    }

    def warning(trouble: str, cure: str) -> Check:
        return Check(
            name=name, status="warning", text=f"{text}; {trouble}", cure=cure, details=details
        )

    first = (omp_num_threads or "").split(",")[0].strip()
    if omp_num_threads is not None and not (first.isdecimal() and int(first) > 0):
        return warning("OMP_NUM_THREADS is not a positive number", "unset it or mend it")
    if first and int(first) > len(affinity):
        return warning(
            "more threads than CPUs: they take turns, and every step waits for the last",
            f"unset OMP_NUM_THREADS, or lower it to at most {len(allowed)}",
        )
    if quota is not None and quota < 0.95 * len(allowed):
        return warning(
            f"a container limit allows only {quota:g} cores' worth of time",
            f"raise the limit (`docker run --cpus`), or set OMP_NUM_THREADS={max(1, int(quota))}",
        )
    if len(allowed) == 1 and len(total) > 1:
        return warning(
            "this process is bound to one core",
            "in a job, ask for cores (--cpus-per-task; Open MPI: --bind-to none)",
        )
    return Check(name=name, status="ok", text=text, details=details)


def read_quota() -> float | None:
    """Read the CPU limit of the control group, version 2 or 1."""
    try:
        return parse_quota(Path("/sys/fs/cgroup/cpu.max").read_text())
    except (OSError, ValueError):
        pass
    folder = Path("/sys/fs/cgroup/cpu")
    try:
        limit = (folder / "cpu.cfs_quota_us").read_text().strip()
        return parse_quota(f"{limit} {(folder / 'cpu.cfs_period_us').read_text()}")
    except (OSError, ValueError):
        return None


def parse_quota(text: str) -> float | None:
    """Read `max 100000` or `150000 100000` as CPUs; None is unlimited. Pure."""
    limit, period = text.split()
    return None if limit == "max" or int(limit) <= 0 else int(limit) / int(period)


def judge_shm(size: tuple[int, int] | None) -> Check:
    """Is there room for shared memory? `size` is (total, free) in bytes, None without /dev/shm."""
    name = "/dev/shm"
    cure = (
        "mount it larger (`docker run --shm-size=8g`, `mount -o remount,size=50% /dev/shm`), and "
        "remove what killed jobs left in it"
    )
    if size is None:
        return Check(name=name, status="broken", text="it does not exist", cure=cure)
    total, free = size
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    details = {"total_bytes": total, "free_bytes": free}
    if free < 8 * _MIB:
        return Check(
            name=name,
            status="broken",
            text=f"{text}: too little for MPI",
            cure=cure,
            details=details,
        )
    if total < SHM_WANTED_BYTES or free < SHM_FREE_WANTED_BYTES:
        return Check(
            name=name,
            status="warning",
            text=f"{text}: gradients in shared memory may not fit",
            cure=cure,
            details=details,
        )
    return Check(name=name, status="ok", text=text, details=details)


def read_shm() -> tuple[int, int] | None:
    """Read total and free bytes of /dev/shm."""
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return None
    return shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize


def judge_memlock(limit_bytes: int | None, infiniband: tuple[str, ...]) -> Check:
    """May MPI pin memory for InfiniBand? `limit_bytes` None is unlimited."""
    name = "locked memory"
    words = "unlimited" if limit_bytes is None else format_bytes(limit_bytes)
    details = {"limit_bytes": limit_bytes, "infiniband": list(infiniband)}
    if not infiniband:
        text = f"limit {words}; no InfiniBand device needs it"
        return Check(name=name, status="ok", text=text, details=details)
    if limit_bytes is None:
        text = f"unlimited, for {', '.join(infiniband)}"
        return Check(name=name, status="ok", text=text, details=details)
    return Check(
        name=name,
        status="warning",
        text=f"limit {words}, though {', '.join(infiniband)} needs pinned memory: MPI and NCCL may "
        "fail or fall back to slow paths",
        cure="have `* - memlock unlimited` set in /etc/security/limits.conf and in the batch "
        "system's daemon (Slurm: LimitMEMLOCK=infinity), or run `ulimit -l unlimited`",
        details=details,
    )


def read_memlock() -> int | None:
    """Read the soft limit of locked memory; None is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def read_infiniband() -> tuple[str, ...]:
    """List the InfiniBand devices."""
    folder = Path("/sys/class/infiniband")
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def read_cpu_flags() -> frozenset[str]:
    """Read the CPU's features from the kernel."""
    try:
        return parse_cpu_flags(Path("/proc/cpuinfo").read_text())
    except OSError:
        return frozenset()


def parse_cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Find the features of the first CPU: `flags` on x86, `Features` on Arm. Pure."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in {"flags", "features"}:
            return frozenset(value.split())
    return frozenset()
