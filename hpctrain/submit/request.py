"""A user's request to a batch system, before any site or dialect comes in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from hpctrain.errors import ConfigError
from hpctrain.exit_codes import RESTART
from hpctrain.submit.words import (
    check_directive_value,
    check_identifier,
    check_name,
    check_path,
    check_printable,
    check_variable,
)

__all__ = ["AFTER_KINDS", "SIGNALS", "Request", "check_job_id"]

SIGNALS = ("USR2", "USR1", "TERM", "HUP")
AFTER_KINDS = ("ok", "any")
MOST_COMMANDS = 1000
_JOB_ID = re.compile("[A-Za-z0-9ƒ][A-Za-z0-9_.\\[\\]-]{0,127}")  # ƒ: Flux
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,127}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One job, or one array of jobs; None leaves the choice to the site."""

    commands: tuple[tuple[str, ...], ...]
    """The argument vector that every rank runs: one, or one for each task of an array."""
    walltime_s: int
    name: str = "hpctrain"
    num_nodes: int = 1
    ranks_per_node: int | None = None
    cpus_per_rank: int | None = None
    gpus_per_node: int | None = None
    memory_mib: int | None = None
    """Per node."""
    template: str | None = None
    mpi: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    log_dir: str = "logs"
    array_size: int | None = None
    array_limit: int | None = None
    """Tasks of the array that may run at a time."""
    after: tuple[str, ...] = ()
    after_kind: str = "ok"
    max_requeues: int = 0
    restart_on: tuple[int, ...] = RESTART
    """Exit codes besides 75 after which the job is run again, while `max_requeues` allows it."""
    signal: str = "USR2"
    signal_lead_s: int | None = None
    """Seconds before the walltime is over at which the ranks get the signal."""
    stage: tuple[str, ...] = ()
    """Files and folders copied to every node's local disk; ranks find them in HPCTRAIN_STAGE."""
    pack: str | None = None
    """An archive of an environment (`hpctrain pack`), unpacked on every node and first on PATH."""
    prologue: tuple[str, ...] = ()
    """An argument vector run once on every node before the ranks start."""
    modules: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    """Shell files to source before anything starts (conda, a site's setup)."""
    venv: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    directives: tuple[str, ...] = ()
    snapshot: str | None = None
    """Which copy of the code the command runs, for the log."""
    expedite: bool = False
    """Slurm 25.11: restart at once after a lost node, before all other jobs."""
    script: str | None = None
    """Where the script will be: for batch systems that cannot requeue it is resubmitted."""

    def __post_init__(self) -> None:
        self._check_commands()
        self._check_numbers()
        check_name(self.name, "job name")
        check_path(self.log_dir, "log directory")
        for what in ("partition", "account", "qos", "reservation"):
            if (given := getattr(self, what)) is not None:
                check_identifier(given, what)
        if self.constraint is not None:  # an expression: [rack1|rack2], (a&b)|c, gpu*2
            check_directive_value(self.constraint, "constraint")
        for job in self.after:
            check_job_id(job)
        _choose(self.after_kind, AFTER_KINDS, "dependency")
        _choose(self.signal, SIGNALS, "signal")
        for module in self.modules:
            check_printable(module, "module")
            if not _MODULE.fullmatch(module):
                raise ConfigError(f"module {module!r} is not a module name, such as gcc/12.2")
        for name, value in self.environment.items():
            check_printable(value, check_variable(name))
        for path in (*self.stage, *self.source, self.pack, self.venv, self.image, self.script):
            if path is not None:
                _check_body_path(path)
        self._check_staged()
        if self.snapshot is not None:
            check_printable(self.snapshot, "snapshot")
        if self.expedite and not self.max_requeues:
            raise ConfigError("expedited restarts need restarts; give --requeue N too")
        for word in (*self.prologue, *self.directives):
            check_printable(word, "a word of the prologue or directives")

    def _check_commands(self) -> None:
        if not self.commands or not all(self.commands):
            raise ConfigError("no command was given; write it after --, as -- python train.py")
        for command in self.commands:
            if not command[0] or command[0].startswith("-"):
                raise ConfigError(
                    f"the command begins with {command[0]!r}, which the launcher would parse as "
                    "its own option; begin with a program"
                )
            for word in command:
                check_printable(word, "the command")
        if self.prologue and (not self.prologue[0] or self.prologue[0].startswith("-")):
            raise ConfigError(
                f"the prologue begins with {self.prologue[0]!r}, which is not a program"
            )
        if len(self.commands) > MOST_COMMANDS:
            raise ConfigError(
                f"{len(self.commands)} commands are too many for one script; at most "
                f"{MOST_COMMANDS}: divide the array"
            )
        if len(self.commands) > 1 and self.array_size != len(self.commands):
            raise ConfigError(
                f"{len(self.commands)} commands need an array of as many tasks, not of "
                f"{self.array_size}"
            )

    def _check_staged(self) -> None:
        """On a node they are side by side in one folder, next to the environment."""
        taken = {"env", "env.tar"} if self.pack is not None else set()
        for path in self.stage:
            name = PurePosixPath(path).name
            if name in ("", "..") or name in taken:
                raise ConfigError(
                    f"{path!r} cannot be staged as {name!r}: its name is empty, or taken by "
                    "another file or the packed environment; rename it"
                )
            taken.add(name)

    def _check_numbers(self) -> None:
        for what, least, most in (
            ("num_nodes", 1, 100_000),
            ("ranks_per_node", 1, 1024),
            ("cpus_per_rank", 1, 1024),
            ("gpus_per_node", 0, 64),
            ("memory_mib", 1, 1 << 40),
            ("walltime_s", 1, 366 * 86400),
            ("array_size", 1, 10_000),
            ("array_limit", 1, 10_000),
            ("max_requeues", 0, 1000),
            ("signal_lead_s", 1, 86400),
        ):
            given = getattr(self, what)
            if given is not None and not least <= given <= most:
                raise ConfigError(f"{what}={given} is out of range; give {least} to {most}")
        for code in self.restart_on:
            if not 1 <= code <= 255:
                raise ConfigError(f"exit code {code} is out of range; give 1 to 255")
        if self.signal_lead_s is not None and self.signal_lead_s >= self.walltime_s:
            raise ConfigError(
                f"the signal would come {self.signal_lead_s} s before the end of a job of "
                f"{self.walltime_s} s; shorten the lead or lengthen the walltime"
            )
        if self.array_limit is not None and self.array_size is None:
            raise ConfigError("array_limit is for arrays; give array_size too, or leave it out")


def check_job_id(job: str) -> str:
    """Refuse what cannot be the id of a job in any batch system."""
    check_printable(job, "job id")
    if not _JOB_ID.fullmatch(job):
        raise ConfigError(f"job id {job!r} is not valid; give it as the batch system printed it")
    return job


def _check_body_path(path: str) -> None:
    check_printable(path, "path")
    if not path or path[0] in "-~":
        raise ConfigError(
            f"path {path!r} is empty, looks like an option or has a ~, which is not expanded; "
            "write the full path"
        )


def _choose(given: str, known: tuple[str, ...], what: str) -> None:
    if given not in known:
        raise ConfigError(f"{what} {given!r} is not known; choose from {', '.join(known)}")
