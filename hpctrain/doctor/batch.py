"""Judges the batch system's tools, and whether srun can start this MPI. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpctrain.batch_systems import all_systems, parse_plugins
from hpctrain.doctor.verdict import Check
from hpctrain.mpi_version import MpiVersion, choose_plugin
from hpctrain.programs import Answer

__all__ = ["judge_batch", "known_tools"]


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
            text=f"{text}; `srun --mpi=list` tells nothing: {plugins.reason}",
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
            f"{', '.join(sorted(offered))}: under srun each rank would be a job of its own",
            cure="start ranks with `hpctrain run` or mpirun inside sbatch, or load an MPI that "
            "matches what srun offers",
            details=details,
        )
    details["srun_mpi_choice"] = plugin
    text = f"{text}; start {mpi} with `srun --mpi={plugin}`"
    return Check(name=name, status="ok", text=text, details=details)
