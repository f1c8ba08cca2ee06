"""What a checkpoint store is, and which there are. No torch, no MPI.

Saver, Trainer, command line and chaos know the protocol; `Store` is its first implementation. A
package adds another under the entry point group `hpctrain.checkpoint_stores`: a name, and a class
that is a `CheckpointStore`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from hpctrain.checkpoint import catalog, verifying
from hpctrain.checkpoint.catalog import Entry
from hpctrain.checkpoint.naming import step_of
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.checkpoint.loading import Loaded

__all__ = [
    "GROUP",
    "CheckpointStore",
    "is_checkpoint",
    "list_checkpoints",
    "read_checkpoint",
    "store_class",
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
        """What has gone wrong on this rank with the last save, or None. Cheap: asked each step."""
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
        """Collective: wait for the last save and let go. Again: nothing happens."""
        ...

    @staticmethod
    def entries(directory: Path) -> Sequence[Entry]:
        """The checkpoints of this store in a directory, oldest first; none if it has none."""
        ...

    @staticmethod
    def verify(path: Path) -> Sequence[str]:
        """Read a whole checkpoint; what is wrong with it, in words."""
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
    others = {point.name: point for point in entry_points(group=GROUP)}
    if name not in others:
        known = ", ".join([_OWN, *sorted(others)])
        raise ConfigError(
            f"store={name!r} is none of the checkpoint stores that are installed: {known}"
        )
    return others[name].load()


def _others() -> Iterator[Any]:
    for point in entry_points(group=GROUP):
        if point.name != _OWN:
            yield point.load()


def list_checkpoints(directory: Path) -> list[Entry]:
    """All checkpoints of a directory, whichever store wrote them, oldest first.

    Looks at manifests, files and their sizes, not at what is in them: `verify` does.

    Raises:
        CheckpointError: the directory is there and cannot be read.
    """
    found = catalog.list_checkpoints(directory)
    for store in _others():
        found += store.entries(directory)
    return sorted(found, key=lambda entry: (entry.number, entry.step))


def verify(path: Path) -> list[str]:
    """Read a whole checkpoint and compare all checksums; what is wrong, in words."""
    store = _store_of(path)
    return verifying.verify(path) if store is None else cast("list[str]", store.verify(path))


def read_checkpoint(path: Path) -> Any:
    """Read the state of a checkpoint, checked, on the CPU; pieces are put together.

    Raises:
        CheckpointError: it is none, or it is damaged.
    """
    store = _store_of(path)
    if store is not None:
        return store.read(path)
    return import_module("hpctrain.checkpoint.alone").read_checkpoint(path)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint by its name, complete or damaged."""
    return step_of(path) is not None or _store_of(path.absolute()) is not None


def _store_of(path: Path) -> Any | None:
    """The store that wrote a checkpoint; None: this package's own."""
    if step_of(path) is not None:
        return None
    for store in _others():
        if any(entry.path == path for entry in store.entries(path.parent)):
            return store
    return None
