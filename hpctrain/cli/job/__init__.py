"""`hpctrain job ACTION`: job scripts and what becomes of them, one action per file."""

from __future__ import annotations

import argparse
from importlib import import_module

__all__ = ["ACTIONS", "add_arguments", "main"]

ACTIONS = {
    # action: its line in the overview; the module hpctrain.cli.job.ACTION has the rest
    "render": "write a job script",
    "submit": "write a job script and submit it",
    "status": "show the state of jobs",
    "logs": "show or follow the log of a job",
    "cancel": "end jobs",
    "efficiency": "compare what a job used with what it requested, and suggest the next request",
    "sites": "list the site profiles, or show one",
    "lint": "find mistakes in a job script that cost node-hours",
}

_EPILOG = """\
exit codes: 0 success; 1 the batch system refused, or lint found something; 2 usage error

examples:
  hpctrain job render --site slurm --time 2h --nodes 2 --ranks-per-node 4 -- python train.py
  hpctrain job submit --site perlmutter --account m1234 --time 2h --nodes 4 -- python train.py
  hpctrain job status; hpctrain job logs -f; hpctrain job lint old_script.sh
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the actions."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, line in ACTIONS.items():
        child = actions.add_parser(
            action,
            help=line,
            description=line,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        import_module(f"hpctrain.cli.job.{action}").add_arguments(child)


def main(args: argparse.Namespace) -> int:
    """Run the action."""
    code: int = import_module(f"hpctrain.cli.job.{args.action}").main(args)
    return code
