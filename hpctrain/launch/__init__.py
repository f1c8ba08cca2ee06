"""Floor 2: `hpctrain run`, from the command line to the script on every rank."""

from __future__ import annotations

from hpctrain.launch.command import Hosts, launch_command, parse_hosts, parse_variable
from hpctrain.launch.script import Program, run_here
from hpctrain.launch.starter import start

__all__ = [
    "Hosts",
    "Program",
    "launch_command",
    "parse_hosts",
    "parse_variable",
    "run_here",
    "start",
]
