"""What is in a folder of shards: one JSON file, written last, so that it is there or not. Pure."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import DataError

__all__ = [
    "MANIFEST",
    "ColumnSpec",
    "Manifest",
    "ShardFile",
    "ShardSpec",
    "describe_dtype",
    "digest_file",
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
class Manifest:
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
    """A dtype as text that tells it from every other. Pure."""
    return dtype.str if dtype.fields is None else repr(dtype.descr)


def digest_file(path: Path) -> str:
    """The checksum of a file's content."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest in one move: readers see the old one, or this one."""
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(manifest)}, indent=1)
    temporary = folder / f".{MANIFEST}.{os.getpid()}"
    with temporary.open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
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
        return Manifest(
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
            f"{path} is missing: {folder} is no folder of shards, or they were not written to the "
            "end; write them with `hpctrain data shard`"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no manifest of shards ({error!r})") from error
