"""Writing shards, by all ranks in parallel: preprocess once, save, read for ever."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain import log
from hpctrain.data.alike import require_alike
from hpctrain.data.source import Source, as_tensor, map_leaves
from hpctrain.data.storage.shards import (
    MANIFEST,
    ColumnSpec,
    ShardFile,
    ShardManifest,
    ShardSpec,
    describe_dtype,
    write_manifest,
)
from hpctrain.errors import ConfigError, DataError
from hpctrain.world import World, agree, takes_timeout

__all__ = ["write_shards"]

_PLAIN_NAME = re.compile(r"[a-z0-9_-]{1,64}")  # some file systems do not tell X from x
_NUMBERED = re.compile(r"column\d+")
_Written = tuple[str, tuple[ColumnSpec, ...], dict[int, ShardSpec]]


@takes_timeout
def write_shards(
    world: World,
    source: Source,
    folder: Path,
    *,
    samples_per_shard: int,
    change: Callable[[Any], Any] | None = None,
    overwrite: bool = False,
    timeout_s: float = 3600.0,
) -> ShardManifest:
    """Collective: write a data set as shards, each rank its own ones; the arguments must match.

    The manifest is written last, atomically: until then the folder is not a data set.

    Args:
        world: The ranks.
        source: The data set; every rank can read it.
        folder: Where to write, on a file system that all ranks see.
        samples_per_shard: How many samples of the source go into a shard.
        change: Applied to each shard's batch, of tensors if torch has the dtype; it may
            change columns, dtypes and the number of samples.
        overwrite: Replace the shards that are there.
        timeout_s: How long to wait for ranks that are slower.

    Raises:
        ConfigError: on all ranks: wrong arguments, or a batch that cannot be written.
        DataError: on all ranks: something could not be written.
    """
    settings = {"folder": str(folder), "samples_per_shard": samples_per_shard}
    require_alike(world, "write_shards", settings, timeout_s=timeout_s)
    trouble = None
    if samples_per_shard < 1:
        trouble = f"samples_per_shard={samples_per_shard} must be at least 1"
    elif (folder / MANIFEST).exists() and not overwrite:
        trouble = f"{folder} holds shards already; choose another folder, or overwrite them"
    agree(world.comm, trouble, error=ConfigError, timeout_s=timeout_s)
    trouble = _clear(folder) if world.rank == 0 else None
    agree(world.comm, trouble, error=DataError, timeout_s=timeout_s)

    wrong: dict[type, str] = {}
    written: _Written = ("", (), {})
    try:
        written = _write_own(world, source, folder, samples_per_shard, change)
    except OSError as error:
        wrong[DataError] = f"{folder} cannot be written to ({error})"
    except DataError as error:
        wrong[DataError] = str(error)
    except Exception as error:  # the user's own function may raise anything
        wrong[ConfigError] = f"{type(error).__name__}: {error}"
    agree(world.comm, wrong.get(DataError), error=DataError, timeout_s=timeout_s)
    agree(world.comm, wrong.get(ConfigError), error=ConfigError, timeout_s=timeout_s)
    manifest = _join(world.comm.allgather(written))
    trouble = None
    if world.rank == 0:
        try:
            write_manifest(folder, manifest)
        except OSError as error:
            trouble = (
                f"the manifest of {folder} cannot be written ({error}); free some space and try "
                "again"
            )
    agree(world.comm, trouble, error=DataError, timeout_s=timeout_s)
    return manifest


def _clear(folder: Path) -> str | None:
    """Make the folder, without a manifest: an old one would describe the wrong files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        for old in folder.glob("shard-*.npy"):
            old.unlink()
    except OSError as error:
        return f"{folder} cannot be written to ({error.strerror})"
    return None


def _write_own(
    world: World,
    source: Source,
    folder: Path,
    samples_per_shard: int,
    change: Callable[[Any], Any] | None,
) -> _Written:
    """This rank's shards: the layout, the columns, and the shards by number."""
    layout = ""
    columns: tuple[ColumnSpec, ...] = ()
    shards: dict[int, ShardSpec] = {}
    starts = range(0, len(source), samples_per_shard)
    for number in range(world.rank, len(starts), world.size):
        stop = min(starts[number] + samples_per_shard, len(source))
        batch = source.take(np.arange(starts[number], stop, dtype=np.int64))
        if change is not None:
            batch = change(map_leaves(as_tensor, batch))
        layout, arrays = _take_apart(batch, number)
        found = tuple(
            ColumnSpec(name=name, dtype=describe_dtype(array.dtype), shape=array.shape[1:])
            for name, array in arrays.items()
        )
        if columns and found != columns:
            raise ConfigError(f"shard {number} has columns {found}, another one has {columns}")
        columns = found
        files = tuple(
            _write_file(folder, f"shard-{number:06d}.{_file_part(name, i)}.npy", array)
            for i, (name, array) in enumerate(arrays.items())
        )
        shards[number] = ShardSpec(num_samples=len(next(iter(arrays.values()))), files=files)
        if world.rank == 0:
            log.notice(f"shard {number + 1} of {len(starts)} is written")
    return layout, columns, shards


def _take_apart(batch: Any, number: int) -> tuple[str, dict[str, np.ndarray]]:
    """A batch as named arrays, and what it was."""
    if isinstance(batch, dict):
        layout, parts = "dict", {str(name): part for name, part in batch.items()}
        if len(parts) < len(batch):
            raise ConfigError(
                f"shard {number}: the names {list(batch)} are not all different as text; rename"
            )
    elif isinstance(batch, tuple | list):
        layout, parts = "tuple", {str(i): part for i, part in enumerate(batch)}
    else:
        layout, parts = "array", {"data": batch}
    arrays = {name: _as_array(part, name) for name, part in parts.items()}
    if len({len(array) for array in arrays.values()}) != 1:
        told = ", ".join(f"{name} {len(array)}" for name, array in arrays.items()) or "no columns"
        raise ConfigError(f"shard {number}: columns must have equally many samples, not {told}")
    return layout, arrays


def _as_array(part: Any, name: str) -> np.ndarray:
    if isinstance(part, torch.Tensor):
        try:
            part = part.detach().cpu().numpy()
        except TypeError as error:
            raise ConfigError(
                f"column {name} is {part.dtype}, which .npy files cannot hold; convert it"
            ) from error
    if not isinstance(part, np.ndarray) or part.ndim == 0 or part.dtype.hasobject:
        kind = f"{type(part).__name__} {getattr(part, 'dtype', '')}".strip()
        raise ConfigError(
            f"column {name} is {kind}; give an array of numbers with one row per sample"
        )
    return part


def _file_part(name: str, number: int) -> str:
    """A column's name if it is a valid and unique file name; else its number."""
    plain = _PLAIN_NAME.fullmatch(name) and not _NUMBERED.fullmatch(name)
    return name if plain else f"column{number}"


class _Digesting:
    """A file that keeps count and checksum of what is written to it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = hashlib.blake2b(digest_size=16)
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Write, and count."""
        self.digest.update(data)
        self.num_bytes += len(data)
        return int(self._file.write(data))


def _write_file(folder: Path, name: str, array: np.ndarray) -> ShardFile:
    temporary = folder / f".{name}.{os.getpid()}"
    with temporary.open("wb") as file:
        counted = _Digesting(file)
        np.lib.format.write_array(counted, np.ascontiguousarray(array), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / name)
    return ShardFile(name=name, num_bytes=counted.num_bytes, digest=counted.digest.hexdigest())


def _join(told: list[_Written]) -> ShardManifest:
    """One manifest of what all ranks wrote. The same on every rank."""
    having = [(rank, part) for rank, part in enumerate(told) if part[2]]
    if not having:
        return ShardManifest(layout="array", columns=(), shards=())
    first, (layout, columns, _) = having[0]
    for rank, part in having:
        if part[:2] != (layout, columns):
            raise ConfigError(
                f"rank {rank} wrote columns {part[1]} and rank {first} wrote {columns}; every "
                "shard must have the same"
            )
    by_number = {number: shard for _, part in having for number, shard in part[2].items()}
    shards = tuple(by_number[number] for number in sorted(by_number))
    return ShardManifest(layout=layout, columns=columns, shards=shards)
