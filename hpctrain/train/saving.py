"""The trainer's use of `hpctrain.saver`, all of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.data import Loader
from hpctrain.replica import Replica
from hpctrain.train.config import Checkpoint, Faults

if TYPE_CHECKING:
    from hpctrain.saver import Saver
    from hpctrain.world import World

__all__ = ["make_saver"]


def make_saver(
    world: World,
    directory: Path,
    replicas: Mapping[str, Replica],
    loader: Loader,
    named: Mapping[str, Any],
    *,
    checkpoint: Checkpoint,
    faults: Faults,
    note: Mapping[str, Any],
) -> Saver:
    """Collective: a saver with the options of a configuration; all arguments must match.

    A single replica is `model` in checkpoints; several have their names, so that none is taken for
    another when their order changes.
    """
    from hpctrain.checkpoint import Keep
    from hpctrain.saver import Saver

    alone = len(replicas) == 1
    return Saver(
        world,
        directory,
        *(replicas.values() if alone else ()),
        loader,
        named=dict(named) | ({} if alone else dict(replicas)),
        keep=Keep(
            last=checkpoint.keep_last,
            best=checkpoint.keep_best,
            best_count=checkpoint.keep_best_count,
            every_hours=checkpoint.keep_every_hours,
        ),
        every_s=None if checkpoint.every_steps is not None else checkpoint.every_s,
        every_steps=checkpoint.every_steps,
        signals=faults.signals,
        mtbf_hours=faults.mtbf_hours,
        asynchronous=checkpoint.asynchronous,
        timeout_s=world.watching.timeout_s,
        note=dict(note),
    )
