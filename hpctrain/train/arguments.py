"""What a trainer is given must go together. Pure."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sized

from hpctrain.errors import ConfigError

__all__ = ["check_arguments", "count_batches", "refuse_no_batch"]


def check_arguments(
    *,
    has_loss: bool,
    has_step: bool,
    measured: Collection[str],
    watched: Collection[str],
    epochs: int | None,
    steps: int | None,
    replicas: Collection[str],
    scheduled: Collection[str],
    saves: bool,
    has_directory: bool,
    tensorboard: bool,
    num_batches: int | None,
) -> None:
    """Refuse what cannot be trained, with what to do.

    Args:
        has_loss: Whether there is a loss.
        has_step: Whether there is a step function.
        measured: What evaluations measure; nothing where there are none.
        watched: What the monitors look at in evaluations.
        epochs: How often all samples are used.
        steps: Steps of the whole training.
        replicas: Their names.
        scheduled: Those that have a schedule.
        saves: Whether checkpoints are made.
        has_directory: Whether there is a run directory.
        tensorboard: Whether events are written.
        num_batches: Of an epoch; None for a stream.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    if epochs is not None and steps is not None:
        raise ConfigError("epochs and steps both say when to stop; give one of them")
    for name, number in (("epochs", epochs), ("steps", steps)):
        if number is not None and number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    refuse_no_batch(num_batches)
    if not has_loss and (not has_step or measured):
        raise ConfigError("Trainer needs a loss; without one, a step function and no evaluation")
    if not has_step and len(replicas) != 1:
        raise ConfigError(f"{len(replicas)} replicas need a step function to train them")
    for name in watched if measured else ():
        if name not in measured:
            raise ConfigError(
                f"the monitor looks at {name!r}, and evaluations measure {', '.join(measured)}; "
                "name one of these, or add the metric"
            )
    if saves and not has_directory:
        raise ConfigError("checkpoint=... needs a directory to write to")
    for name in scheduled:
        if name not in replicas:
            known = ", ".join(replicas)
            raise ConfigError(f"there is no replica {name!r} for a schedule; there are {known}")
    if tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "logging.tensorboard=true needs the package tensorboard; install it by "
            "`pip install tensorboard`, or leave it out"
        )


def count_batches(loader: Sized) -> int | None:
    """Batches of an epoch; None for a stream, which does not say."""
    try:
        return len(loader)
    except TypeError:
        return None


def refuse_no_batch(num_batches: int | None) -> None:
    """Refuse epochs that make no step: a training of so many steps would never end.

    Raises:
        ConfigError: there is not one batch.
    """
    if num_batches == 0:
        raise ConfigError(
            "an epoch of these data has no batch: there are fewer samples than a batch has, and "
            "drop_last leaves them out; lower global_batch, or keep the last batch"
        )
