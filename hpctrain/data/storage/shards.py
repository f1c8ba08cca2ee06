"""A folder of shards as a source: `.npy` files and one JSON manifest; what can be wrong with one.

The manifest is written last, so that a data set is there or not.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.partition import Indices
from hpctrain.data.storage.formats import open_npy
from hpctrain.errors import ConfigError, DataError

__all__ = [
    "MANIFEST",
    "ColumnSpec",
    "ShardFile",
    "ShardManifest",
    "ShardSpec",
    "Shards",
    "check_file",
    "check_shard",
    "describe_dtype",
    "digest_file",
    "most_mapped",
    "read_manifest",
    "write_manifest",
]


MANIFEST = "manifest.json"
_FORMAT = "hpctrain-shards"
_VERSION = 1
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnSpec:
    """A column: its name, the dtype of its numbers and the shape of a sample."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """One column of one shard."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """A shard: how many samples, and one file for each column."""

    num_samples: int
    files: tuple[ShardFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardManifest:
    """The whole data set."""

    layout: str
    """What a batch is: `array`, `tuple` or `dict`."""
    columns: tuple[ColumnSpec, ...]
    shards: tuple[ShardSpec, ...]

    @property
    def num_samples(self) -> int:
        """Of all shards together."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(file.num_bytes for shard in self.shards for file in shard.files)


def describe_dtype(dtype: np.dtype[Any]) -> str:
    """A dtype as unique text. Pure."""
    return dtype.str if dtype.fields is None else repr(dtype.descr)


def digest_file(path: Path) -> str:
    """The checksum of a file's content."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, manifest: ShardManifest) -> None:
    """Write the manifest in one move: readers see the old one, or this one."""
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(manifest)}, indent=1)
    temporary = folder / f".{MANIFEST}.{os.getpid()}"
    with temporary.open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> ShardManifest:
    """Read what is in a folder of shards.

    Raises:
        DataError: there is no manifest, or it is not one.
    """
    path = folder / MANIFEST
    try:
        told = json.loads(path.read_text())
        if told["format"] != _FORMAT or told["version"] != _VERSION:
            raise DataError(
                f"{path} says {told['format']!r} version {told['version']!r}; this hpctrain reads "
                f"{_FORMAT!r} version {_VERSION}"
            )
        return ShardManifest(
            layout=told["layout"],
            columns=tuple(
                ColumnSpec(name=c["name"], dtype=c["dtype"], shape=tuple(c["shape"]))
                for c in told["columns"]
            ),
            shards=tuple(
                ShardSpec(
                    num_samples=s["num_samples"], files=tuple(ShardFile(**f) for f in s["files"])
                )
                for s in told["shards"]
            ),
        )
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing: {folder} is not a folder of shards, or writing them was "
            "interrupted; write them with `hpctrain data shard`"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a manifest of shards ({error!r})") from error


_MOST_NAMED = 5
_MOST_MAPPED = 1024


class Shards:
    """Samples in a folder of shards; files are mapped into memory when they are first read.

    A map holds a file descriptor, of which a process has few: those not used for longest are let
    go.

    Args:
        folder: Where the manifest is.
        columns: Which columns; None takes all. With a choice, a batch is a dict.
        part: Check only each `part[1]`-th file, from `part[0]` on: other ranks check the rest.

    Raises:
        DataError: the manifest or a file is missing or has another size than it should.
        ConfigError: a column is unknown.
    """

    def __init__(
        self,
        folder: Path,
        *,
        columns: Sequence[str] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._columns = _choose(folder, self.manifest, columns)
        self._layout = self.manifest.layout if columns is None else "dict"
        self._ends = np.cumsum([shard.num_samples for shard in self.manifest.shards])
        self._maps: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()
        names = [file for shard in self.manifest.shards for file in shard.files]
        wrong = [text for file in names[part[0] :: part[1]] if (text := check_file(folder, file))]
        if wrong:
            more = f" (and {len(wrong) - _MOST_NAMED} more)" if len(wrong) > _MOST_NAMED else ""
            raise DataError("; ".join(wrong[:_MOST_NAMED]) + more)

    def __len__(self) -> int:
        return self.manifest.num_samples

    def take(self, indices: Indices) -> Any:
        """These samples as one batch: from each shard one gather of rows."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise ConfigError(
                f"samples from {indices.min()} to {indices.max()} are not all from 0 to "
                f"{len(self) - 1}"
            )
        shards = np.searchsorted(self._ends, indices, side="right")
        parts = [np.flatnonzero(shards == shard) for shard in np.unique(shards)]
        batch = [self._gather(column, indices, shards, parts) for column in self._columns]
        if self._layout == "array":
            return batch[0]
        if self._layout == "tuple":
            return tuple(batch)
        names = [self.manifest.columns[column].name for column in self._columns]
        return dict(zip(names, batch, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        """Without the maps: the receiver maps the files again."""
        return {**self.__dict__, "_maps": OrderedDict()}

    def _gather(
        self, column: int, indices: Indices, shards: np.ndarray, parts: list[np.ndarray]
    ) -> np.ndarray:
        if not self.manifest.shards:
            return np.empty((0, *self.manifest.columns[column].shape))
        first = self._map(int(shards[0]) if len(shards) else 0, column)
        out = np.empty((len(indices), *first.shape[1:]), first.dtype)
        for places in parts:
            shard = int(shards[places[0]])
            start = int(self._ends[shard]) - self.manifest.shards[shard].num_samples
            out[places] = self._map(shard, column)[indices[places] - start]
        return out

    def _map(self, shard: int, column: int) -> np.ndarray:
        key = (shard, column)
        if key in self._maps:
            self._maps.move_to_end(key)
            return self._maps[key]
        while len(self._maps) >= most_mapped():
            self._maps.popitem(last=False)
        path = self.folder / self.manifest.shards[shard].files[column].name
        self._maps[key] = open_npy(path)
        return self._maps[key]


def most_mapped() -> int:
    """How many files may be mapped: a part of what the process may open, for others open some too.

    Asked each time: the limit is the process's, and a worker's may be another.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        _MOST_MAPPED if limit == resource.RLIM_INFINITY else max(1, min(_MOST_MAPPED, limit // 4))
    )


def check_file(folder: Path, file: ShardFile) -> str | None:
    """Check that a file exists with its full size; returns what is wrong."""
    path = folder / file.name
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path} is missing" if not path.exists() else f"{path}: {error.strerror}"
    if size != file.num_bytes:
        what = "truncated" if size < file.num_bytes else "too long"
        return f"{path} is {what}: {size} bytes instead of {file.num_bytes}"
    return None


def check_shard(folder: Path, manifest: ShardManifest, number: int) -> list[str]:
    """Read a shard from end to end; returns everything that is wrong with it."""
    shard = manifest.shards[number]
    wrong: list[str] = []
    for column, file in zip(manifest.columns, shard.files, strict=True):
        path = folder / file.name
        trouble = check_file(folder, file)
        try:
            if trouble is None and digest_file(path) != file.digest:
                trouble = f"{path} has changed since it was written: its checksum differs"
        except OSError as error:
            trouble = f"{path} cannot be read ({error.strerror})"
        if trouble is None:
            try:
                array = open_npy(path)
            except DataError as error:
                trouble = str(error)
            else:
                found = (describe_dtype(array.dtype), array.shape)
                wanted = (column.dtype, (shard.num_samples, *column.shape))
                if found != wanted:
                    trouble = f"{path} holds {found} instead of {wanted}"
        if trouble is not None:
            wrong.append(trouble)
    return wrong


def _choose(folder: Path, manifest: ShardManifest, columns: Sequence[str] | None) -> list[int]:
    names = [column.name for column in manifest.columns]
    if columns is None:
        return list(range(len(names)))
    unknown = [name for name in columns if name not in names]
    if unknown or not columns:
        asked = f"has no column {unknown[0]!r}" if unknown else "was asked for no column"
        raise ConfigError(f"{folder} {asked}; its columns are {', '.join(names)}")
    return [names.index(name) for name in columns]
