"""Judges the machine: cores, shared and locked memory, clock, batch system.

Reading is apart from judging, which is pure.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.batch_systems import all_systems, parse_plugins
from hpctrain.doctor.verdict import Check
from hpctrain.log import format_bytes, format_ranges
from hpctrain.mpi_version import MpiVersion, choose_plugin
from hpctrain.programs import Answer
from hpctrain.world import CoreMap

__all__ = [
    "ClockState",
    "judge_batch",
    "judge_clock",
    "judge_cores",
    "judge_memlock",
    "judge_shm",
    "known_tools",
    "parse_chronyc",
    "parse_cpu_flags",
    "parse_quota",
    "parse_timedatectl",
    "read_clock",
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
        return warning("OMP_NUM_THREADS is not a positive number", "unset or correct it")
    if first and int(first) > len(affinity):
        return warning(
            "more threads than CPUs: threads compete, and every step waits for the slowest",
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
        "remove leftovers of killed jobs"
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
        cure="set `* - memlock unlimited` in /etc/security/limits.conf and in the batch "
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


_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
_TIMEX_BYTES = 256  # struct timex needs 208
_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockState:
    """Whether the clock is synchronised (None: unknown), and the source."""

    synchronised: bool | None
    source: str


def judge_clock(state: ClockState) -> Check:
    """Is the clock kept in time?"""
    name = "clock"
    details = {"synchronised": state.synchronised, "source": state.source}
    if state.synchronised is None:
        text = "unknown whether it is synchronised"
        return Check(name=name, status="ok", text=text, details=details)
    if state.synchronised:
        text = f"synchronised ({state.source})"
        return Check(name=name, status="ok", text=text, details=details)
    return Check(
        name=name,
        status="warning",
        text=f"not synchronised ({state.source}): the logs of several nodes may not line up",
        cure="start the time service (`systemctl enable --now chronyd`, or systemd-timesyncd); a "
        "virtual machine or container relies on its host's",
        details=details,
    )


def parse_timedatectl(text: str) -> bool | None:
    """Read `timedatectl show --property=NTPSynchronized`. Pure."""
    values = {"NTPSynchronized=yes": True, "NTPSynchronized=no": False}
    return values.get(text.strip())


def parse_chronyc(text: str) -> bool | None:
    """Read the leap status, the last field of `chronyc -c tracking`. Pure."""
    fields = text.strip().split(",")
    return fields[-1] != "Not synchronised" if len(fields) > 10 else None


def read_clock(which: Callable[[str], Path | None], ask: Callable[..., Answer]) -> ClockState:
    """Query the time services, then the kernel."""
    questions = (
        ("timedatectl", ("show", "--property=NTPSynchronized"), parse_timedatectl),
        ("chronyc", ("-c", "tracking"), parse_chronyc),
    )
    for tool, words, parse in questions:
        path = which(tool)
        answer = ask(str(path), *words, limit_s=_LIMIT_S) if path else None
        if answer is not None and answer.code == 0 and (said := parse(answer.out)) is not None:
            return ClockState(synchronised=said, source=tool)
    return ClockState(synchronised=_ask_kernel(), source="the kernel")


def _ask_kernel() -> bool | None:
    """Read the kernel's clock state; adjtimex(2) with modes = 0 changes nothing."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (AttributeError, OSError):
        return None
    if state < 0:
        return None
    # modes, offset, freq, maxerror, esterror, status: C's own alignment
    status = struct.unpack_from("@IllllI", timex.raw)[-1]
    return not status & _UNSYNCHRONISED


def known_tools() -> dict[str, tuple[str, ...]]:
    """The tools of each batch system; those that have the same tools cannot be told apart."""
    titles: dict[tuple[str, ...], list[str]] = {}
    for system in all_systems():
        if system.tools:
            titles.setdefault(system.tools, []).append(system.title)
    return {" or ".join(same): tools for tools, same in titles.items()}


def judge_batch(tools: Mapping[str, Path], plugins: Answer | None, mpi: MpiVersion | None) -> Check:
    """Which batch system is here, and how does its launcher start this MPI?

    Args:
        tools: The tools found on PATH.
        plugins: The answer to `srun --mpi=list`; None without srun.
        mpi: The MPI that mpi4py loads.
    """
    name = "batch system"
    systems = [
        f"{system} ({', '.join(tool for tool in names if tool in tools)})"
        for system, names in known_tools().items()
        if any(tool in tools for tool in names)
    ]
    details: dict[str, object] = {"tools": {tool: str(path) for tool, path in tools.items()}}
    if not systems:
        return Check(name=name, status="ok", text="no batch system's tools on PATH")
    text = " and ".join(systems)
    if plugins is None or mpi is None:
        return Check(name=name, status="ok", text=text, details=details)
    offered = parse_plugins(plugins.out + "\n" + plugins.err) if plugins.code == 0 else frozenset()
    details["srun_mpi"] = sorted(offered)
    if not offered:
        return Check(
            name=name,
            status="warning",
            text=f"{text}; `srun --mpi=list` failed: {plugins.reason}",
            cure="is this machine part of the cluster? check SLURM_CONF and slurmctld, or run "
            "doctor on a login node",
            details=details,
        )
    plugin = choose_plugin(mpi, offered)
    if plugin is None:
        wanted = " or ".join(mpi.srun_plugins or ("its own",))
        return Check(
            name=name,
            status="warning",
            text=f"{text}; {mpi} needs srun --mpi={wanted}, but srun offers only "
            f"{', '.join(sorted(offered))}: under srun each rank would be a separate job",
            cure="start ranks with `hpctrain run` or mpirun inside sbatch, or load an MPI that "
            "matches what srun offers",
            details=details,
        )
    details["srun_mpi_choice"] = plugin
    text = f"{text}; start {mpi} with `srun --mpi={plugin}`"
    return Check(name=name, status="ok", text=text, details=details)
