"""The handshake before a job: are all ranks about to run the same thing?

What would corrupt a run (another torch, another script) is refused; what may only hurt it (little
memory, clocks apart) causes a warning. Comparing is pure; only `preflight` communicates.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import __version__, log
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.log import name_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

__all__ = ["MODES", "Finding", "Report", "compare", "digest_config", "preflight", "script_path"]

MODES = ("default", "strict", "off")

CLOCK_BOUND_S = 1.0
SHM_FLOOR_BYTES = 64 << 20
MEMORY_FLOOR_BYTES = 512 << 20

# field of Report -> (name for people, cure, whether a difference corrupts the run)
_MUST_MATCH: Mapping[str, tuple[str, str, bool]] = {
    "hpctrain": ("hpctrain", "install the same version on every node", True),
    "torch": ("torch", "install the same version on every node", True),
    "python": ("Python", "use the same interpreter on every node", True),
    "mpi": ("MPI library", "load the same MPI module on every node", True),
    "script": ("the script's content", "copy the same file to every node", True),
    "config": ("the config digest", "give every rank the same configuration", True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank says of itself before the job starts."""

    host: str
    hpctrain: str
    torch: str
    python: str
    mpi: str
    script: str
    config: str
    clock_s: float
    shm_free_bytes: int
    memory_free_bytes: int
    local_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One difference or shortage, in words."""

    text: str
    corrupts: bool


def compare(reports: Sequence[Report]) -> list[Finding]:
    """Compare what all ranks reported, in rank order. Pure.

    Returns:
        What differs or is short, each named by rank and host; empty when all is well.
    """
    findings = []
    for field, (name, cure, corrupts) in _MUST_MATCH.items():
        groups: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            groups.setdefault(getattr(report, field), []).append(rank)
        if len(groups) > 1:
            said = "; ".join(
                f"{value} on {_who(ranks, reports)}" for value, ranks in groups.items()
            )
            findings.append(Finding(text=f"{name} differs: {said}; {cure}", corrupts=corrupts))
    return [*findings, *_shortages(reports)]


def _shortages(reports: Sequence[Report]) -> list[Finding]:
    middle = sorted(report.clock_s for report in reports)[len(reports) // 2]
    checks = (
        (
            [abs(report.clock_s - middle) > CLOCK_BOUND_S for report in reports],
            f"the clock is off by more than {CLOCK_BOUND_S:g} s",
            "have the node's time service fixed; logs and traces will not line up",
        ),
        (
            [report.shm_free_bytes < SHM_FLOOR_BYTES * report.local_size for report in reports],
            f"/dev/shm has less than {SHM_FLOOR_BYTES >> 20} MiB free per rank",
            "free it, or mount it larger; shared-memory exchange may not fit",
        ),
        (
            [
                report.memory_free_bytes < MEMORY_FLOOR_BYTES * report.local_size
                for report in reports
            ],
            f"less than {MEMORY_FLOOR_BYTES >> 20} MiB of memory is free per rank",
            "ask for more memory, or start fewer ranks per node",
        ),
    )
    return [
        Finding(
            text=f"{what} on {_who([r for r, bad in enumerate(flags) if bad], reports)}; {cure}",
            corrupts=False,
        )
        for flags, what, cure in checks
        if any(flags)
    ]


def _who(ranks: Sequence[int], reports: Sequence[Report]) -> str:
    hosts = list(dict.fromkeys(reports[rank].host for rank in ranks))
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"{name_ranks(ranks, limit=8)} ({shown})"


def digest_config(config: object) -> str:
    """Digest a configuration: anything JSON can write, whatever the order of its keys.

    Raises:
        ConfigError: it holds something JSON cannot write.
    """
    if config is None:
        return "none"
    try:
        text = json.dumps(config, sort_keys=True, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"config cannot be compared between ranks ({error}); pass plain dicts, lists, numbers "
            "and strings, e.g. dataclasses.asdict(config)"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def script_path() -> Path | None:
    """Find the file this process runs; None in an interactive session."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(path) if path and Path(path).is_file() else None


def _digest_script() -> str:
    path = script_path()
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path else "none"


def _own_report(comm: Comm, host: str, local_size: int, config: str, mpi: str) -> Report:
    import psutil
    import torch

    facts: dict[str, Any] = {
        "host": host,
        "hpctrain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mpi": mpi,
        "script": _digest_script(),
        "config": config,
        "memory_free_bytes": psutil.virtual_memory().available,
        "local_size": local_size,
    }
    shm = os.statvfs("/dev/shm")
    comm.Barrier()  # all ranks look at their clocks at the same moment
    return Report(clock_s=time.time(), shm_free_bytes=shm.f_bavail * shm.f_frsize, **facts)


def preflight(comm: Comm, *, host: str, local_size: int, config: str, mpi: str, mode: str) -> None:
    """Collective: compare all ranks before the job starts; `mode` must be the same everywhere.

    Args:
        comm: All ranks.
        host: This rank's host name.
        local_size: Ranks on this node.
        config: Digest of this rank's configuration.
        mpi: The MPI library in words.
        mode: `default` refuses what would corrupt the run and warns of the rest, `strict` refuses
            both, `off` looks at nothing.

    Raises:
        LaunchError: on all ranks, with everything that was found.
    """
    if mode not in MODES:
        raise ConfigError(f"preflight={mode!r} is unknown; choose one of {', '.join(MODES)}")
    if mode == "off":
        return
    reports = comm.gather(_own_report(comm, host, local_size, config, mpi), root=0)
    findings: list[Finding] = comm.bcast(compare(reports) if reports else None, root=0)
    refused = [f.text for f in findings if f.corrupts or mode == "strict"]
    if refused:
        raise LaunchError(
            "preflight refused the job:\n  - "
            + "\n  - ".join(refused)
            + "\n(init(preflight='off') skips these checks)"
        )
    if comm.Get_rank() == 0:
        for finding in findings:
            log.warn(finding.text)
