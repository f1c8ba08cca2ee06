"""Exit codes that mean something between a training, the job script and the batch system."""

from __future__ import annotations

__all__ = ["DIED", "INTERRUPTED", "REQUEUE", "RESTART", "TIMED_OUT"]

REQUEUE = 75
"""The work is saved but not finished: run this job again (EX_TEMPFAIL of sysexits.h).

A training leaves with it after a signal, on all ranks and after a last barrier: launchers end the
other ranks as soon as one leaves with a code other than 0. The job script hands the job back to
the batch system, as often as its limit allows. Sites that set Slurm's `RequeueExit` use the same
number.
"""

TIMED_OUT = 124
"""A collective did not end in time, as after `timeout`: a node that hangs, or the script."""

DIED = 137
"""A rank was killed or crashed without a word: as a shell says it of SIGKILL."""

INTERRUPTED = 130
"""Ctrl-C: as a shell says it of SIGINT."""

RESTART = (TIMED_OUT, DIED)
"""After these a job script with restarts left runs the job again, besides `REQUEUE`.

A lost node, a killed rank and a rank that hangs end with one of them. A script that would fail in
the same way again is stopped by its checkpoints, which do not advance between two restarts.
"""
