"""A user's configuration, short enough to be disturbed many times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.train.config import Config, load_config, to_toml

__all__ = ["EVERY_STEPS", "shorten", "write_config"]

EVERY_STEPS = 2
"""Steps between checkpoints."""


def write_config(
    file: Path, settings: Sequence[str], scratch: Path, name: str, *, num_steps: int
) -> Path:
    """Write a shortened copy whose run directory is in `scratch`; where it is.

    Raises:
        ConfigError: the configuration is wrong, or cannot be shortened.
    """
    config = shorten(load_config(file, settings), file.resolve().parent, num_steps=num_steps)
    config = replace(config, logging=replace(config.logging, directory=str(scratch / name)))
    copy = scratch / f"{name}.toml"
    copy.write_text(to_toml(config))
    return copy


def shorten(config: Config, folder: Path, *, num_steps: int) -> Config:
    """The same training with few steps, a checkpoint every second one, and every guard on. Pure.

    Weights are each rank's own, all of them, and updated by itself: a node's ranks that divide the
    update write each other's weights anew at every step, and what was flipped in one is healed.

    Args:
        config: The user's.
        folder: What its files are relative to.
        num_steps: Of the whole training.
    """
    data, schedule = config.data, config.schedule
    return replace(
        config,
        data=replace(
            data,
            files=tuple(str(folder / name) for name in data.files),
            evaluation_files=tuple(str(folder / name) for name in data.evaluation_files),
        ),
        train=replace(
            config.train, epochs=None, steps=num_steps, patience=None, evaluate_every_steps=None
        ),
        schedule=replace(schedule, warmup_steps=min(schedule.warmup_steps, num_steps // 2)),
        engine=replace(config.engine, update="replicated", share_parameters=False),
        checkpoint=replace(
            config.checkpoint,
            enabled=True,
            every_s="auto",
            every_steps=EVERY_STEPS,
            keep_last=3,
            keep_best=None,
            keep_best_count=1,
            keep_every_hours=None,
        ),
        logging=replace(config.logging, every_steps=1, tensorboard=False, display="off"),
        faults=replace(
            config.faults,
            signals=("SIGUSR2", "SIGUSR1", "SIGTERM"),
            sentinel_every_steps=1,
            nonfinite="stop",
        ),
    )
