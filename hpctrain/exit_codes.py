"""Exit codes that mean something between a training, the job script and the batch system."""

from __future__ import annotations

__all__ = ["DIED", "INTERRUPTED", "REQUEUE", "RESTART", "TIMED_OUT"]

REQUEUE = 75
"""The work is saved but not finished: run this job again (EX_TEMPFAIL of sysexits.h).

A training exits with it after a signal, on all ranks and after a last barrier: launchers kill the
other ranks as soon as one exits with a nonzero code. The job script requeues the job, as often as
its limit allows. Sites that set Slurm's `RequeueExit` use the same number.
"""

TIMED_OUT = 124
"""A collective timed out, as with `timeout`: a node or the script hangs."""

DIED = 137
"""A rank was killed or crashed silently: what a shell reports for SIGKILL."""

INTERRUPTED = 130
"""Ctrl-C: what a shell reports for SIGINT."""

RESTART = (TIMED_OUT, DIED)
"""After these codes, and `REQUEUE`, a job script with restarts left runs the job again.

A lost node, a killed rank and a hang end with one of them. A script that would fail in the same way
again is stopped because its checkpoints do not advance between two restarts.
"""
