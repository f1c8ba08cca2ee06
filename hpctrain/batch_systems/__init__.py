"""Floor 1: the batch systems: one module each, free of torch and MPI.

Everything specific to a batch system is in its module: client commands, directives, launch
line, job ids, states, variables, the time left, and what it cannot do. Others ask for a system
(`find_system`, `detect_system`) and then for a capability, never for a name.
"""

from __future__ import annotations

from hpctrain.batch_systems.job import (
    FINAL,
    JobRequest,
    JobSite,
    JobState,
    JobUse,
    PlannedJob,
    Template,
)
from hpctrain.batch_systems.launchers import LauncherRow
from hpctrain.batch_systems.registry import (
    all_systems,
    detect_launcher,
    detect_system,
    find_system,
    find_system_titled,
    find_template,
    known_launchers,
    templates,
)
from hpctrain.batch_systems.slurm import ask_plugins, parse_plugins
from hpctrain.batch_systems.system import Ask, BatchSystem, Refused, ask_program, given, unreadable
from hpctrain.batch_systems.units import format_clock, format_memory, parse_duration, parse_memory

__all__ = [
    "FINAL",
    "Ask",
    "BatchSystem",
    "JobRequest",
    "JobSite",
    "JobState",
    "JobUse",
    "LauncherRow",
    "PlannedJob",
    "Refused",
    "Template",
    "all_systems",
    "ask_plugins",
    "ask_program",
    "detect_launcher",
    "detect_system",
    "find_system",
    "find_system_titled",
    "find_template",
    "format_clock",
    "format_memory",
    "given",
    "known_launchers",
    "parse_duration",
    "parse_memory",
    "parse_plugins",
    "templates",
    "unreadable",
]
