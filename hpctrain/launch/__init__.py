"""Floor 2: `hpctrain run`, from the command line to the script on every rank."""

from __future__ import annotations

from hpctrain.launch.command import (
    Hosts,
    launch_command,
    launch_environment,
    parse_hosts,
    parse_variable,
)
from hpctrain.launch.gpus import count_gpus, explain_sharing
from hpctrain.launch.program import Program, is_another_python, read_program
from hpctrain.launch.script import run_here, tee_output
from hpctrain.launch.starter import start

__all__ = [
    "Hosts",
    "Program",
    "count_gpus",
    "explain_sharing",
    "is_another_python",
    "launch_command",
    "launch_environment",
    "parse_hosts",
    "parse_variable",
    "read_program",
    "run_here",
    "start",
    "tee_output",
]
