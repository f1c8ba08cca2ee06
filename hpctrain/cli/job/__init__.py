"""`hpctrain job ACTION`: job scripts and what becomes of them, one action per file."""

from __future__ import annotations

import argparse
from importlib import import_module

__all__ = ["ACTIONS", "add_arguments", "main"]

ACTIONS = {
    # action: its line in the overview; the module hpctrain.cli.job.ACTION has the rest
    "render": "write a job script",
    "submit": "write a job script and hand it to the batch system",
    "status": "say how jobs are doing",
    "logs": "show the log of a job, also while it grows",
    "cancel": "end jobs",
    "efficiency": "show what a job used of what it asked for, and what to ask for next time",
    "sites": "list the site profiles, or show one",
    "lint": "name the mistakes in a job script that cost node-hours",
}

_EPILOG = """\
exit codes: 0 well; 1 the batch system refuses, or lint found something; 2 wrong usage

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
