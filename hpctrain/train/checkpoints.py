"""The trainer's checkpoints: how they are saved, and whether a changed configuration may resume.

What a checkpoint holds wins over the file: a learning rate that was changed in it would be written
down in config.toml and never used. So a change that cannot take effect is refused by its key.
Everything else is this job's, as the file says it now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import Keep, list_checkpoints
from hpctrain.data import Loader
from hpctrain.errors import ConfigError
from hpctrain.replica import Replica
from hpctrain.saver import Saver
from hpctrain.train.config import Checkpoint, Config, Faults, Schedule, parse_config
from hpctrain.world import World

__all__ = ["describe_changes", "falls_until", "make_saver", "saved_config"]


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


_OPTIMIZER = ("name", "lr", "weight_decay", "exclude_norms", "args")
_FALLING = ("cosine", "polynomial")


def falls_until(config: Config, num_steps: int | None) -> int | None:
    """The step at which a recipe's rate has come to its end; None where no end moves it."""
    chosen = config.schedule
    if chosen.name != "recipe" or chosen.decay not in _FALLING:
        return None
    return chosen.decay_steps or num_steps


def saved_config(checkpoints: Path) -> tuple[Path, Config] | None:
    """The newest checkpoint and its configuration; None where none can be read."""
    for entry in reversed(list_checkpoints(checkpoints)):
        if entry.manifest is None or entry.trouble is not None:
            continue
        note = entry.note
        text = note.get("user", {}).get("config") if isinstance(note, dict) else None
        if text is None:
            return None
        try:
            return entry.path, parse_config(text)
        except ConfigError:  # of another version of hpctrain: the parts compare themselves
            return None
    return None


def describe_changes(
    saved: Config, now: Config, *, saved_end: int | None, end: int | None
) -> list[str]:
    """Changes that could not take effect, each with its reason. Pure.

    Args:
        saved: The configuration that the checkpoint was saved with.
        now: The one to resume with.
        saved_end: The step until which the rate was to fall, see `falls_until`.
        end: The same for the one to resume with.
    """
    held = "it is restored from the checkpoint"
    lines = [f"{line}: {held}" for line in _differences(saved, now, "optimizer", _OPTIMIZER)]
    lines += [f"{line}: {held}" for line in _differences(saved, now, "schedule", _schedule_keys())]
    when = _compare("schedule.every", saved.schedule.when, now.schedule.when)
    lines += [f"{line}: {held}" for line in when]
    if saved.schedule.is_plateau and now.schedule.is_plateau:
        metric = _compare("schedule.metric", saved.plateau_metric, now.plateau_metric)
        lines += [f"{line}: the best so far was found by the other" for line in metric]
    if (saved.ema.decay is None) != (now.ema.decay is None):
        lines += [
            f"{line}: an average must cover the whole run"
            for line in _differences(saved, now, "ema", ("decay",))
        ]
    lines += [
        f"{line}: the order of samples and the random numbers are the checkpoint's"
        for line in _differences(saved, now, "train", ("seed",))
    ]
    if saved.precision.kind == now.precision.kind:
        keys = ("init_scale",)
        lines += [f"{line}: {held}" for line in _differences(saved, now, "precision", keys)]
    kept = saved.checkpoint.keep_best is not None and now.checkpoint.keep_best is not None
    for title, name in (("train", "monitor"), *([("checkpoint", "keep_best")] if kept else [])):
        lines += [
            f"{line}: the best so far was found by the other"
            for line in _differences(saved, now, title, (name,))
        ]
    return lines + _rate_changes(saved, now, saved_end, end)


def _rate_changes(saved: Config, now: Config, saved_end: int | None, end: int | None) -> list[str]:
    """What would move a recipe's rate besides the keys of its section."""
    if saved.schedule.name != "recipe" or now.schedule.name != "recipe":
        return []
    batches = _differences(saved, now, "train", ("global_batch",))
    if batches:
        return [f"{line}: the recipe's rate follows from it" for line in batches]
    if saved_end is None or end is None or saved_end == end:
        return []
    goal = _differences(saved, now, "train", ("steps", "epochs")) or ["the number of samples"]
    told = f"{', '.join(goal)}: the rate was to decay until step {saved_end}, and now until {end}"
    if saved.schedule.end == 0:
        return [f"{told}; at step {saved_end} it is 0, so longer training needs a new run"]
    return [
        f"{told}; schedule.decay_steps={saved_end} leaves it as it was, and later steps have the "
        "rate that it ends with"
    ]


def _schedule_keys() -> tuple[str, ...]:
    """All but the one that says until when: what counts is what comes of it."""
    recipe = (name for name in Schedule.RECIPE if name != "decay_steps")
    return ("name", "args", *recipe)


def _differences(saved: Config, now: Config, title: str, names: tuple[str, ...]) -> list[str]:
    was, new = getattr(saved, title), getattr(now, title)
    return [
        line
        for name in names
        for line in _compare(f"{title}.{name}", getattr(was, name), getattr(new, name))
    ]


def _compare(key: str, was: Any, new: Any) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*was, *new]):
            yield from _compare(f"{key}.{name}", was.get(name), new.get(name))
    elif was != new:
        yield f"{key} {_word(was)} -> {_word(new)}"


def _word(value: Any) -> str:
    return "left out" if value is None else repr(value)
