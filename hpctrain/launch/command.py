"""The mpirun command line of each MPI, and lists of hosts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.batch_systems import find_system_titled
from hpctrain.errors import ConfigError
from hpctrain.mpi_version import MpiVersion

__all__ = [
    "Hosts",
    "explain_unstarted",
    "launch_command",
    "launch_environment",
    "parse_hosts",
    "parse_variable",
]

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Hosts with their numbers of ranks, in order."""

    slots: tuple[tuple[str, int], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks on all hosts together."""
        return sum(count for _, count in self.slots)

    def __str__(self) -> str:
        return ",".join(f"{host}:{count}" for host, count in self.slots)


def parse_hosts(text: str) -> Hosts:
    """Read hosts: `a:4,b:4`, or the lines of a hostfile of Open MPI, MPICH, PBS or Slurm.

    A line may be `a`, `a:4`, `a slots=4` or `a max_slots=4`; `#` starts a comment; a host that
    comes again gets more ranks, as in $PBS_NODEFILE.

    Raises:
        ConfigError: an entry is not a host, a count is not positive, or there is none.
    """
    slots: dict[str, int] = {}
    for line in text.splitlines():
        for entry in line.partition("#")[0].split(","):
            if entry.strip():
                host, count = _parse_entry(entry.strip())
                slots[host] = slots.get(host, 0) + count
    if not slots:
        raise ConfigError("no hosts were given; write them as 'a:4,b:4' or one per line in a file")
    return Hosts(slots=tuple(slots.items()))


def _parse_entry(entry: str) -> tuple[str, int]:
    name, _, rest = entry.replace(":", " ", 1).partition(" ")
    match = re.fullmatch(
        r"(?:(?:max_)?slots\s*=\s*)?(\d+)(?:\s+max_slots\s*=\s*\d+)?", rest.strip()
    )
    if not _HOST.fullmatch(name) or (rest.strip() and match is None):
        raise ConfigError(
            f"host entry {entry!r} is not valid; write NAME, NAME:COUNT or NAME slots=COUNT"
        )
    count = int(match.group(1)) if match else 1
    if count < 1:
        raise ConfigError(f"host entry {entry!r} requests {count} ranks; give at least 1")
    return name, count


def parse_variable(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Read `NAME=VALUE`, or `NAME`, whose value is this process's. Pure.

    Raises:
        ConfigError: it is not a name, or not set here.
    """
    name, sign, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"-x {text!r} is not a variable; write NAME or NAME=VALUE")
    if not sign and name not in environ:
        raise ConfigError(f"-x {name}: it is not set here; write {name}=VALUE")
    return name, value if sign else environ[name]


def launch_command(
    mpirun: Path,
    version: MpiVersion,
    *,
    num_ranks: int,
    root: bool,
    hosts: Hosts | None = None,
    pass_on: Sequence[str] = (),
) -> list[str]:
    """Write the start of the command line that launches `num_ranks` ranks with this MPI.

    Args:
        mpirun: The launcher.
        version: What it is.
        num_ranks: How many ranks.
        root: Whether the user is root, whom Open MPI refuses unless told.
        hosts: Where to start them; None starts all of them here.
        pass_on: Names of variables that remote ranks must see.
    """
    command = [str(mpirun), "-n", str(num_ranks)]
    if version.family == "openmpi":
        return command + _openmpi_flags(version, root=root, hosts=hosts, pass_on=pass_on)
    if hosts is not None:
        command += ["-hosts", str(hosts)]
        if pass_on:
            command += ["-genvlist", ",".join(pass_on)]
    return command


def _openmpi_flags(
    version: MpiVersion, *, root: bool, hosts: Hosts | None, pass_on: Sequence[str]
) -> list[str]:
    flags = ["--allow-run-as-root"] if root else []
    # Open MPI binds small jobs to one core a rank, which starves threads; hpctrain counts cores.
    flags += ["--bind-to", "none"]
    if int(version.version.split(".")[0] or 0) >= 5:
        flags += ["--map-by", ":OVERSUBSCRIBE"]
    else:
        flags += ["--oversubscribe"]
    if hosts is not None:
        flags += ["--host", str(hosts)]
        flags += [part for name in pass_on for part in ("-x", name)]
    return flags


def launch_environment(
    version: MpiVersion, *, num_ranks: int, num_cores: int, batch_system: str | None = None
) -> Mapping[str, str]:
    """Variables the launcher and the ranks need besides the user's own.

    Open MPI's ranks and Horovod's background threads both spin while they wait, so more than half a
    rank per core already takes cores from those that compute: waiting ranks then yield. Hydra
    starts its proxies by srun in a Slurm job; if those were offered PMIx as well, MPICH would see
    two process managers and abort.
    """
    if version.family == "openmpi":
        scarce = 2 * num_ranks > num_cores
        return {"OMPI_MCA_mpi_yield_when_idle": "1"} if scarce else {}
    system = find_system_titled(batch_system)
    return {} if system is None else dict(system.mpirun_variables)


def explain_unstarted(mpirun: str, code: int, absent: int, unknown: Sequence[str] | None) -> str:
    """Advise what to check when the launcher failed before all ranks had started.

    Args:
        mpirun: The launcher.
        code: Its exit code.
        absent: How many ranks was never reached.
        unknown: Hosts whose names do not resolve; None where no hosts were given.
    """
    text = f"{mpirun} failed (exit code {code}) before {absent} of the ranks had started"
    if unknown is None:
        return f"{text}; its output is above, and `hpctrain doctor` looks for the cause"
    if unknown:
        return f"{text}; unknown host: {', '.join(unknown)}; correct --hosts or the hostfile"
    return (
        f"{text}; check that `ssh HOST true` works for each host without a password, and that this "
        "Python is at the same path there"
    )
