"""Which checkpoint is meant: the newest of a run, or the best by what its evaluations measured."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.catalog import Entry
from hpctrain.checkpoint.retention import Candidate, choose_best
from hpctrain.checkpoint.stores import is_checkpoint, list_checkpoints, read_checkpoint
from hpctrain.errors import CheckpointError, ConfigError

__all__ = ["average_name", "checkpoints_of", "find_checkpoint", "load_weights", "weights_in"]


def checkpoints_of(path: Path) -> list[Entry]:
    """The checkpoints of a directory, of a run directory, or the one that the path is.

    Raises:
        CheckpointError: there is none, or several folders have some.
    """
    if is_checkpoint(path):
        path = path.absolute()
        found = [entry for entry in list_checkpoints(path.parent) if entry.path == path]
        return found or _none(path)
    entries = list_checkpoints(path)
    if entries or not path.is_dir():
        return entries or _none(path)
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    inside = {folder: found for folder in folders if (found := list_checkpoints(folder))}
    if len(inside) > 1:
        raise CheckpointError(
            f"{path} has checkpoints in {', '.join(folder.name for folder in inside)}; name one"
        )
    return next(iter(inside.values()), None) or _none(path)


def _none(path: Path) -> list[Entry]:
    raise CheckpointError(
        f"{path} holds no checkpoint; give a run directory, the directory that has been saved to, "
        "or one of the checkpoint-... directories in it"
    )


def find_checkpoint(path: str | Path, *, best: bool | str = False) -> Path:
    """The newest complete checkpoint, or the best one that is kept. No MPI.

    Args:
        path: A run directory, a directory of checkpoints, or one checkpoint.
        best: The best by a metric that was saved with checkpoints: `min:loss`, `max:accuracy`; True
            takes what the run itself calls better (`checkpoint.keep_best`, else `train.monitor`).

    Raises:
        CheckpointError: there is none, or none with that metric.
        ConfigError: the run does not say what is better.
    """
    entries = [entry for entry in checkpoints_of(Path(path)) if entry.trouble is None]
    if not entries:
        raise CheckpointError(f"{path} holds no complete checkpoint")
    if best is False:
        return entries[-1].path
    metric = _own_metric(entries, path) if best is True else best
    candidates = [
        Candidate(number=entry.number, metrics=entry.manifest.metrics)
        for entry in entries
        if entry.manifest is not None
    ]
    order = choose_best(candidates, metric)
    if not order:
        raise CheckpointError(
            f"no checkpoint of {path} was saved with {metric.partition(':')[2]}; {_known(entries)}"
        )
    return next(entry.path for entry in entries if entry.number == order[0])


def load_weights(
    path: str | Path, *, best: bool | str = False, ema: bool = False, key: str = "model"
) -> dict[str, Any]:
    """The weights of a run, for `model.load_state_dict`, checked, on the CPU. No MPI.

    Args:
        path: A run directory, a directory of checkpoints, or one checkpoint.
        best: As in `find_checkpoint`: the best instead of the newest.
        ema: The averaged weights (`[ema]` in a file), with the model's other buffers.
        key: Where the model is in the state: `NAME.model` where several are trained.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: it has no such model, or no average.
    """
    found = find_checkpoint(path, best=best)
    return weights_in(read_checkpoint(found), found, ema=ema, key=key)


def average_name(key: str) -> str:
    """Where the state has the average of the weights that are under a key. Pure."""
    prefix = key.rpartition(".")[0]
    return f"ema-{prefix}" if prefix else "ema"


def weights_in(state: Any, path: Path, *, ema: bool, key: str) -> dict[str, Any]:
    """The weights, or their averages, in the state of a checkpoint. Pure."""
    known = [name for name in state if name.rpartition(".")[2] == "model"]
    if key not in state:
        raise ConfigError(f"{path} has no {key!r} in its state; models are {', '.join(known)}")
    weights = dict(state[key])
    if ema:
        name = average_name(key)
        if name not in state:
            raise ConfigError(
                f"{path} has no average of the weights of {key!r}; write [ema] decay in the "
                "training's file, or leave --ema and ema=True out"
            )
        weights |= state[name]["averages"]
    return weights


def _own_metric(entries: Sequence[Entry], path: str | Path) -> str:
    """What the configuration of a run calls better."""
    from hpctrain.checkpoint.unflattening import unflatten

    manifest = entries[-1].manifest
    note = None if manifest is None else unflatten(manifest.note, {})
    user = note.get("user") if isinstance(note, dict) else None
    text = user.get("config") if isinstance(user, dict) else None
    try:
        config = tomllib.loads(text or "")
    except tomllib.TOMLDecodeError:
        config = {}
    own = config.get("checkpoint", {}).get("keep_best") or config.get("train", {}).get("monitor")
    if not isinstance(own, str):
        raise ConfigError(
            f"{path} does not say which metric is better; name it, as in min:loss (--metric; in "
            f"Python best='min:loss'); {_known(entries)}"
        )
    return own


def _known(entries: Sequence[Entry]) -> str:
    names = dict.fromkeys(n for e in entries if e.manifest is not None for n in e.manifest.metrics)
    if not names:
        return "its checkpoints were saved without metrics"
    return f"there are {', '.join(names)}"
