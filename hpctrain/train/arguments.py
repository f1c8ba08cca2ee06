"""What a trainer is given must go together. Pure."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection

from hpctrain.errors import ConfigError

__all__ = ["check_arguments"]


def check_arguments(
    *,
    has_loss: bool,
    has_step: bool,
    evaluates: bool,
    epochs: int | None,
    steps: int | None,
    replicas: Collection[str],
    scheduled: Collection[str],
    saves: bool,
    has_directory: bool,
    tensorboard: bool,
) -> None:
    """Refuse what cannot be trained, with what to do.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    if epochs is not None and steps is not None:
        raise ConfigError("epochs and steps both say when to stop; give one of them")
    for name, number in (("epochs", epochs), ("steps", steps)):
        if number is not None and number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    if not has_loss and (not has_step or evaluates):
        raise ConfigError("Trainer needs a loss; without one, a step function and no evaluation")
    if not has_step and len(replicas) != 1:
        raise ConfigError(f"{len(replicas)} replicas need a step function to train them")
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
