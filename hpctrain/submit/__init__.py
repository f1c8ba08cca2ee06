"""Floor 6: job scripts, their submission, and a linter for those written by hand.

A job goes through it like this: `request` (what is requested) and `site` (a profile) become a
`plan`; `rendering` writes the script; `submission` hands it to the batch system, and `ledger`
records it; `status` queries its state. Nothing here needs torch or MPI: a login node has
neither. The linter is loaded on first use, with the parser of bash that it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy
from hpctrain.submit.efficiency import advise_request, find_summaries, read_used
from hpctrain.submit.ledger import Ledger, SubmittedJob
from hpctrain.submit.mpi_choice import choose_srun_mpi
from hpctrain.submit.pack import outside_paths, pack_environment
from hpctrain.submit.places import JOBS, state_home, user_sites
from hpctrain.submit.plan import JobPlan, make_plan
from hpctrain.submit.rendering import render
from hpctrain.submit.request import AFTER_KINDS, SIGNALS, Request, check_job_id
from hpctrain.submit.site import Site, find_sites, load_site
from hpctrain.submit.snapshot import run_snapshot, take_snapshot
from hpctrain.submit.status import ask_states, follow, is_over, last_lines, log_paths, runs_of
from hpctrain.submit.submission import new_folder, submit, write_script
from hpctrain.submit.sweep import (
    Point,
    fill_words,
    forget_exit,
    grid_points,
    job_states,
    launch,
    list_points,
    note_exit,
    note_jobs,
    random_points,
    read_results,
    sweep_commands,
    task_states,
    withdraw_sweep,
    write_sweep,
)

if TYPE_CHECKING:
    from hpctrain.submit.lint import LEVELS, LintFinding, lint_script

__all__ = [
    "AFTER_KINDS",
    "JOBS",
    "LEVELS",
    "SIGNALS",
    "JobPlan",
    "Ledger",
    "LintFinding",
    "Point",
    "Request",
    "Site",
    "SubmittedJob",
    "advise_request",
    "ask_states",
    "check_job_id",
    "choose_srun_mpi",
    "fill_words",
    "find_sites",
    "find_summaries",
    "follow",
    "forget_exit",
    "grid_points",
    "is_over",
    "job_states",
    "last_lines",
    "launch",
    "lint_script",
    "list_points",
    "load_site",
    "log_paths",
    "make_plan",
    "new_folder",
    "note_exit",
    "note_jobs",
    "outside_paths",
    "pack_environment",
    "random_points",
    "read_results",
    "read_used",
    "render",
    "run_snapshot",
    "runs_of",
    "state_home",
    "submit",
    "sweep_commands",
    "take_snapshot",
    "task_states",
    "user_sites",
    "withdraw_sweep",
    "write_script",
    "write_sweep",
]

__getattr__ = lazy(__name__, {".lint": ("LEVELS", "LintFinding", "lint_script")})
