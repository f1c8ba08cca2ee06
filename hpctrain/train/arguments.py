"""Checks of the trainer's arguments. Pure."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sized

from hpctrain.errors import ConfigError

__all__ = ["check_arguments", "count_batches", "refuse_no_batch"]


def check_arguments(
    *,
    has_loss: bool,
    has_step: bool,
    measured: Collection[str],
    watched: Collection[str],
    needs_evaluation: str | None,
    epochs: int | None,
    steps: int | None,
    replicas: Collection[str],
    belonging: Collection[str],
    saves: bool,
    has_directory: bool,
    loggers: Mapping[str, str | None],
    num_batches: int | None,
) -> None:
    """Refuse what cannot be trained, with what to do.

    Args:
        has_loss: Whether there is a loss.
        has_step: Whether there is a step function.
        measured: What evaluations measure; nothing where there are none.
        watched: The results that monitors and schedules follow.
        needs_evaluation: What steps after evaluations, in words; None where nothing does.
        epochs: How often all samples are used.
        steps: Steps of the whole training.
        replicas: Their names.
        belonging: The replicas that schedules and averages are given for.
        saves: Whether checkpoints are made.
        has_directory: Whether there is a run directory.
        loggers: What is written besides metrics.jsonl, by its key, and the package it needs.
        num_batches: Of an epoch; None for a stream.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    if epochs is not None and steps is not None:
        raise ConfigError("epochs and steps both define when to stop; give one of them")
    for name, number in (("epochs", epochs), ("steps", steps)):
        if number is not None and number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    refuse_no_batch(num_batches)
    if not has_loss and measured and len(replicas) != 1:
        raise ConfigError(
            f"{len(replicas)} replicas are evaluated by a loss, and none was given; give one, or "
            "leave out the evaluation"
        )
    if not has_step and len(replicas) != 1:
        raise ConfigError(f"{len(replicas)} replicas need a step function to train them")
    for name in watched if measured else ():
        if name not in measured:
            raise ConfigError(
                f"a monitor or schedule follows {name!r}, and evaluations measure "
                f"{', '.join(measured)}; name one of these, or add the metric"
            )
    if needs_evaluation is not None and not measured:
        raise ConfigError(
            f"{needs_evaluation} steps after evaluations, and there are none; give evaluation=... "
            "(in a file data.evaluation or data.evaluation_files)"
        )
    if saves and not has_directory:
        raise ConfigError("checkpoint=... needs a directory to write to")
    for name in belonging:
        if name not in replicas:
            known = ", ".join(replicas)
            raise ConfigError(
                f"there is no replica {name!r} for a schedule or an average; there are {known}"
            )
    for key, package in loggers.items():
        if not has_directory:
            raise ConfigError(f"{key} needs a directory to write to")
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key} needs the package {package}; install it by `pip install "
                f"hpctrain[{package}]`, or leave it out"
            )


def count_batches(loader: Sized) -> int | None:
    """Batches of an epoch; None for a stream of unknown length."""
    try:
        return len(loader)
    except TypeError:
        return None


def refuse_no_batch(num_batches: int | None) -> None:
    """Refuse epochs that make no step: training for a number of steps would never end.

    Raises:
        ConfigError: there is not one batch.
    """
    if num_batches == 0:
        raise ConfigError(
            "an epoch of these data has no batch: there are fewer samples than in a batch, and "
            "drop_last drops them; lower global_batch, or keep the last batch"
        )
