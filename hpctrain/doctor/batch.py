"""Judges the batch system's tools, and whether srun can start this MPI. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from hpctrain.doctor.verdict import Check
from hpctrain.install.asking import Answer
from hpctrain.install.mpi import MpiVersion

__all__ = ["TOOLS", "choose_plugin", "judge_batch", "parse_plugins"]

TOOLS: Mapping[str, tuple[str, ...]] = {
    "Slurm": ("sbatch", "srun"),
    "PBS or Grid Engine": ("qsub",),
    "LSF": ("bsub",),
    "Flux": ("flux",),
}

# What each MPI can be started with, best first; a name also stands for its versions (pmix_v4).
_PLUGINS: Mapping[str, tuple[str, ...]] = {
    "openmpi": ("pmix",),
    "mpich": ("pmi2",),
    "mvapich": ("pmi2",),
    "intel": ("pmi2",),
    "cray": ("cray_shasta", "cray", "pmi2"),
}


def parse_plugins(text: str) -> frozenset[str]:
    """Read the output of `srun --mpi=list`, whichever version wrote it."""
    names: set[str] = set()
    for line in text.splitlines():
        body = re.sub(r"^srun:\s*", "", line.strip())
        if body.lower().startswith(("mpi plugin types", "mpi types")):
            continue
        body = re.sub(r"^specific \w+ plugin versions available:\s*", "", body, flags=re.IGNORECASE)
        words = [word.strip() for word in body.split(",")]
        names.update(word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word))
    return frozenset(names)


def choose_plugin(family: str, offered: Collection[str]) -> str | None:
    """Choose srun's `--mpi` for an MPI from what srun offers; None when nothing fits."""
    for wanted in _PLUGINS.get(family, ()):
        if wanted in offered:
            return wanted
        versions = sorted(name for name in offered if name.startswith(f"{wanted}_"))
        if versions:
            return versions[-1]
    return None


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
        for system, names in TOOLS.items()
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
            text=f"{text}; `srun --mpi=list` tells nothing: {plugins.reason}",
            cure="is this machine part of the cluster? check SLURM_CONF and slurmctld, or run "
            "doctor on a login node",
            details=details,
        )
    plugin = choose_plugin(mpi.family, offered)
    if plugin is None:
        wanted = " or ".join(_PLUGINS.get(mpi.family, ("its own",)))
        return Check(
            name=name,
            status="warning",
            text=f"{text}; {mpi} needs srun --mpi={wanted}, but srun offers only "
            f"{', '.join(sorted(offered))}: under srun each rank would be a job of its own",
            cure="start ranks with `hpctrain run` or mpirun inside sbatch, or load an MPI that "
            "matches what srun offers",
            details=details,
        )
    details["srun_mpi_choice"] = plugin
    text = f"{text}; start {mpi} with `srun --mpi={plugin}`"
    return Check(name=name, status="ok", text=text, details=details)
