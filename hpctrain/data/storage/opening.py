"""A path to a source: what it holds is told by its name, or by the manifest in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from hpctrain.data.alike import require_alike
from hpctrain.data.arrays import ArraySource
from hpctrain.data.source import Source
from hpctrain.data.storage.container import choose_columns
from hpctrain.data.storage.formats import Hdf5, NetCdf, Zarr
from hpctrain.data.storage.manifest import MANIFEST
from hpctrain.data.storage.numpy_files import open_npy, open_npz
from hpctrain.data.storage.shards import Shards
from hpctrain.data.structure import leaves
from hpctrain.errors import ConfigError, DataError, HpcTrainError
from hpctrain.world import World, agree

__all__ = ["files", "open_path", "open_paths"]

_CONTAINERS: dict[str, type[Hdf5] | type[Zarr] | type[NetCdf]] = {
    ".h5": Hdf5,
    ".hdf5": Hdf5,
    ".he5": Hdf5,
    ".zarr": Zarr,
    ".nc": NetCdf,
    ".nc4": NetCdf,
}


def files(
    world: World,
    *paths: str | Path,
    columns: Sequence[str] | None = None,
    timeout_s: float = 300.0,
) -> Source:
    """Collective: open a data set that every rank can read; the arguments must match.

    Args:
        world: The ranks.
        paths: One file or folder of shards; or several `.npy` files, which become the columns of a
            tuple.
        columns: Which arrays of an archive, a container or shards; None takes all that are as long
            as the longest. Batches are dicts by name then.
        timeout_s: How long to wait for ranks that do not come.

    Returns:
        A source for a loader; a rank reads only the samples that it takes.

    Raises:
        DataError: on all ranks, when a file is missing or broken on some; it is named.
        ConfigError: on all ranks, when the arguments are wrong.
    """
    source: Source | None = None
    form: list[tuple[str, str, tuple[int, ...]]] = []
    trouble: dict[type[HpcTrainError], str] = {}
    try:
        source = open_paths(*paths, columns=columns, part=(world.rank, world.size))
        form = _form_of(source)
    except (ConfigError, DataError) as error:
        trouble[type(error)] = str(error)
    except Exception as error:  # each library has its own, and the other ranks wait
        told = ", ".join(map(str, paths))
        trouble[DataError] = f"{told} cannot be opened ({type(error).__name__}: {error})"
    agree(world.comm, trouble.get(DataError), error=DataError, timeout_s=timeout_s)
    agree(world.comm, trouble.get(ConfigError), error=ConfigError, timeout_s=timeout_s)
    opened = cast(Source, source)  # or this rank would have had trouble
    found = {"number of samples": len(opened), "columns (name, dtype, shape of a sample)": form}
    require_alike(world, "files", found, timeout_s=timeout_s)
    return opened


def _form_of(source: Source) -> list[tuple[str, str, tuple[int, ...]]]:
    """What a batch consists of, seen on one without rows."""
    batch = source.take(np.empty(0, np.int64))
    return [(name, str(leaf.dtype), tuple(leaf.shape[1:])) for name, leaf in leaves(batch)]


def open_paths(
    *paths: str | Path, columns: Sequence[str] | None = None, part: tuple[int, int] = (0, 1)
) -> Source:
    """Open a data set on this rank alone.

    Args:
        paths: As `files` takes them.
        columns: Which arrays; None takes all.
        part: Of a folder of shards, look only at each `part[1]`-th file, from `part[0]` on.
    """
    if not paths:
        raise ConfigError("no path was given; give a file, a folder of shards or some .npy files")
    if len(paths) == 1:
        return open_path(Path(paths[0]), columns=columns, part=part)
    odd = [path for path in paths if Path(path).suffix != ".npy"]
    if odd or columns is not None:
        raise ConfigError(
            f"several paths must be .npy files, one a column, without columns=; {odd or columns} "
            "cannot be put beside others: open one path"
        )
    return ArraySource(tuple(open_npy(Path(path)) for path in paths))


def open_path(
    path: Path, *, columns: Sequence[str] | None = None, part: tuple[int, int] = (0, 1)
) -> Source:
    """Open one file, or one folder of shards, on this rank alone."""
    if not path.exists():
        raise DataError(f"{path} is missing")
    if (path / MANIFEST).is_file():  # whatever the folder is called
        return Shards(path, columns=columns, part=part)
    if path.suffix in _CONTAINERS:
        return _CONTAINERS[path.suffix](path, columns)
    if path.is_dir():
        return Shards(path, columns=columns, part=part)
    if path.name == MANIFEST:
        return Shards(path.parent, columns=columns, part=part)
    if path.suffix == ".npz":
        return ArraySource(_pick(path, open_npz(path), columns))
    if path.suffix == ".npy":
        if columns is not None:
            raise ConfigError(f"{path} is one array; leave columns= out")
        return ArraySource(open_npy(path))
    known = ".npy, .npz, " + ", ".join(_CONTAINERS)
    raise ConfigError(f"{path}: what {path.suffix!r} files hold is unknown; known are {known}")


def _pick(path: Path, arrays: dict[str, Any], columns: Sequence[str] | None) -> dict[str, Any]:
    lengths = {name: array.shape[0] for name, array in arrays.items() if array.shape}
    return {name: arrays[name] for name in choose_columns(path, lengths, columns)}
