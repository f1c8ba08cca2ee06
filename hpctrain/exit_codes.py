"""Exit codes that mean something between a training, the job script and the batch system."""

from __future__ import annotations

__all__ = ["DIED", "INTERRUPTED", "REQUEUE", "TIMED_OUT"]

REQUEUE = 75
"""The work is saved but not finished: run this job again (EX_TEMPFAIL of sysexits.h).

A training leaves with it after a signal, on all ranks and after a last barrier: launchers end the
other ranks as soon as one leaves with a code other than 0. The job script hands the job back to
the batch system, as often as its limit allows. Sites that set Slurm's `RequeueExit` use the same
number.
"""

TIMED_OUT = 124
"""A collective did not end in time: as after `timeout`. The same script would hang again."""

DIED = 137
"""A rank was killed or crashed without a word: as a shell says it of SIGKILL."""

INTERRUPTED = 130
"""Ctrl-C: as a shell says it of SIGINT."""
