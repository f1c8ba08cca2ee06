"""The errors a user can meet: one base, one class per kind of mistake.

Every message says what was given, what is required and what to do. Whoever raises one on several
ranks raises the same text on all of them (see `hpctrain.world.agreement`).
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "DataError",
    "DriftError",
    "HpcTrainError",
    "InstallError",
    "JobError",
    "LaunchError",
    "NonFiniteError",
    "StageError",
    "TimedOutError",
]


class HpcTrainError(Exception):
    """Base of everything hpctrain raises on purpose."""


class ConfigError(HpcTrainError, ValueError):
    """A value the user gave is wrong, or does not go together with another."""


class LaunchError(HpcTrainError):
    """The job was not started the way MPI needs it: wrong launcher, MPI or environment."""


class CollectiveError(HpcTrainError):
    """Ranks did not meet where they should have: someone is missing, late, or disagrees."""


class TimedOutError(CollectiveError):
    """A rank did not arrive in time; the message names it. The job ends with exit code 124."""


class InstallError(HpcTrainError):
    """Something could not be installed or built; the message has the cause, log and cure."""


class JobError(HpcTrainError):
    """The batch system refused, or did not answer, or does not know the job."""


class NonFiniteError(HpcTrainError, ArithmeticError):
    """Gradients are inf or NaN repeatedly: the run cannot continue by skipping steps."""


class StageError(HpcTrainError, RuntimeError):
    """The model or the loss function raised in one stage of a pipeline; all ranks raise this."""


class DriftError(HpcTrainError):
    """Weights that should be the same on all ranks are not: a flipped bit, or different updates."""


class DataError(HpcTrainError):
    """A file of a data set is missing, truncated or not what it says; the message names it."""


class CheckpointError(HpcTrainError):
    """A checkpoint is damaged, does not fit, or could not be written; the message names it."""
