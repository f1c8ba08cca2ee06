"""Where and with what a result was measured; nothing that names a host, a user or a path."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

__all__ = ["ROOT", "cpu_name", "describe_machine", "machine_id"]

ROOT = Path(__file__).resolve().parents[2]
"""What holds the package: a checkout, or an environment's site-packages."""
_PACKAGES = ("torch", "mpi4py", "horovod", "numpy")


def describe_machine(*, mpi: str) -> dict[str, object]:
    """Describe this machine and the software; `mpi` is what the ranks said they run on."""
    cores = len(os.sched_getaffinity(0))
    return {
        "id": machine_id(platform.machine(), cores),
        "cpu": cpu_name(),
        "arch": platform.machine(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "mpi": mpi,
        **{name: _version(name) for name in _PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--", "hpctrain", "benchmarks")),
    }


def machine_id(arch: str, cores: int) -> str:
    """A short name for machines of one kind. Pure."""
    return f"{arch}-{cores}core{'s' if cores != 1 else ''}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """What the processor calls itself; ARM's /proc/cpuinfo has only numbers, lscpu the name."""
    text = _output(["lscpu"])
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model name" and value.strip() not in ("", "-"):
            return value.strip()
    return platform.processor() or platform.machine()


def _git(*words: str) -> str | None:
    if not (ROOT / ".git").exists():  # a repository around an environment is somebody else's
        return None
    return _output(["git", "-C", str(ROOT), *words]).strip() or None


def _output(command: list[str]) -> str:
    """What a command says; nothing when it is missing or fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
