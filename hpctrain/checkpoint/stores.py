"""What a checkpoint store is, and which there are. No torch, no MPI.

Saver, Trainer, command line and chaos know the protocol; `Store` is its first implementation. A
package adds another under the entry point group `hpctrain.checkpoint_stores`: a name, and a class
that is a `CheckpointStore`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from hpctrain.checkpoint import directory as own
from hpctrain.checkpoint.directory import Entry, choose_best
from hpctrain.checkpoint.format import step_of
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.plugins import find_plugins, load_plugin

if TYPE_CHECKING:
    from hpctrain.checkpoint.loading import Loaded

__all__ = [
    "GROUP",
    "CheckpointStore",
    "checkpoints_of",
    "find_checkpoint",
    "is_checkpoint",
    "list_checkpoints",
    "store_class",
    "store_of",
    "verify",
]

GROUP = "hpctrain.checkpoint_stores"
_OWN = "hpctrain"


class CheckpointStore(Protocol):
    """A directory of checkpoints.

    Made collectively with `(world, directory, *, keep, writers_per_node, asynchronous, late_s)`;
    what it cannot follow it refuses with a ConfigError. `save`, `wait`, `load`, `claim` and `close`
    are collective. The static methods need neither ranks nor MPI.
    """

    directory: Path

    @property
    def is_saving(self) -> bool:
        """Whether this rank is still writing."""
        ...

    @property
    def failed(self) -> str | None:
        """Why the last save failed on this rank, or None. Cheap: checked each step."""
        ...

    def save(
        self,
        state: object,
        *,
        step: int,
        own: object | None = None,
        note: object = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """Collective: save a tree of plain values, tensors and pieces, and what each rank owns."""
        ...

    def wait(self) -> Path | None:
        """Collective: wait until the last save is complete; raise on all ranks if it failed."""
        ...

    def load(
        self, path: str | Path | None = None, *, like: Mapping[str, object] | None = None
    ) -> Loaded | None:
        """Collective: the newest valid checkpoint, or a certain one; None: there is none."""
        ...

    def list(self) -> Sequence[Entry]:
        """Its checkpoints, oldest first, damaged ones included. No communication."""
        ...

    def claim(self) -> None:
        """Collective: refuse a directory that another job saves into, as far as that is known."""
        ...

    def close(self) -> None:
        """Collective: wait for the last save and close. A second call does nothing."""
        ...

    @staticmethod
    def entries(directory: Path) -> Sequence[Entry]:
        """The checkpoints of this store in a directory, oldest first; none if it has none."""
        ...

    @staticmethod
    def verify(path: Path) -> Sequence[str]:
        """Read a whole checkpoint; returns what is wrong with it."""
        ...

    @staticmethod
    def read(path: Path) -> Any:
        """The state of a checkpoint, on the CPU, pieces put together."""
        ...


def store_class(name: str) -> Any:
    """The class of a store.

    Raises:
        ConfigError: there is none of that name; those that there are are listed.
    """
    if name == _OWN:
        return import_module("hpctrain.checkpoint.store").Store
    others = find_plugins(GROUP, own=(_OWN,))
    if name not in others:
        known = ", ".join([_OWN, *others])
        raise ConfigError(
            f"store={name!r} is not an installed checkpoint store; installed: {known}"
        )
    return load_plugin(others[name], f"checkpoint store {name!r}")


def _others() -> Iterator[Any]:
    for name in find_plugins(GROUP, own=(_OWN,)):
        yield store_class(name)


def list_checkpoints(directory: Path) -> list[Entry]:
    """All checkpoints of a directory, whichever store wrote them, oldest first.

    Checks manifests, files and their sizes, not their contents: `verify` does.

    Raises:
        CheckpointError: the directory is there and cannot be read.
    """
    found = own.list_checkpoints(directory)
    for store in _others():
        found += store.entries(directory)
    return sorted(found, key=lambda entry: (entry.number, entry.step))


def verify(path: Path) -> list[str]:
    """Read a whole checkpoint and compare all checksums; returns what is wrong."""
    store = store_of(path)
    return own.verify(path) if store is None else cast("list[str]", store.verify(path))


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint by its name, complete or damaged."""
    return step_of(path) is not None or store_of(path.absolute()) is not None


def store_of(path: Path) -> Any | None:
    """The store that wrote a checkpoint; None: this package's own."""
    if step_of(path) is not None:
        return None
    for store in _others():
        if any(entry.path == path for entry in store.entries(path.parent)):
            return store
    return None


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
    order = choose_best(entries, metric)
    if not order:
        raise CheckpointError(
            f"no checkpoint of {path} was saved with {metric.partition(':')[2]}; {_known(entries)}"
        )
    return next(entry.path for entry in entries if entry.number == order[0])


def _own_metric(entries: Sequence[Entry], path: str | Path) -> str:
    """What the configuration of a run calls better."""
    note = entries[-1].note
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
    names = dict.fromkeys(name for entry in entries for name in entry.metrics)
    if not names:
        return "its checkpoints were saved without metrics"
    return f"there are {', '.join(names)}"
