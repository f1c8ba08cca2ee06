"""A path to a source: its name, or the manifest in it, determines its content.

Files whose rows follow each other are one source of many parts.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch

from hpctrain.data.alike import require_alike
from hpctrain.data.partition import Indices
from hpctrain.data.source import ArraySource, Source, leaves, map_leaves
from hpctrain.data.storage.formats import SUFFIXES as PT
from hpctrain.data.storage.formats import (
    Container,
    Hdf5,
    NetCdf,
    Zarr,
    choose_columns,
    open_npy,
    open_npz,
    open_pt,
)
from hpctrain.data.storage.shards import MANIFEST, Shards, describe_dtype, most_mapped
from hpctrain.errors import ConfigError, DataError, HpcTrainError
from hpctrain.world import World, agree, takes_timeout

__all__ = [
    "Named",
    "RowParts",
    "files",
    "find_parts",
    "form_of",
    "inspect",
    "name_columns",
    "name_files",
    "open_named",
    "open_path",
]


_PARTS = (".npz", ".pt", ".pth")
"""Files that name their arrays: in a folder of them, each can only be a part of the rows."""

Form = list[tuple[str, str, tuple[int, ...]]]


class RowParts:
    """The rows of several files, one file after the other.

    Files are opened when they are first read. Those not used for longest are closed where there are
    more than a process may have open.

    Args:
        paths: The files, in the order of their rows.
        opened: Opens one of them.

    Raises:
        ConfigError: they have other columns, dtypes or shapes than the first one.
    """

    is_in_memory = False

    def __init__(self, paths: Sequence[Path], opened: Callable[[Path], Source]) -> None:
        self._paths = tuple(paths)
        self._open = opened
        self._sources: OrderedDict[int, Source] = OrderedDict()
        first: Form = []
        lengths = []
        for number, path in enumerate(self._paths):
            source = self._part(number)
            lengths.append(len(source))
            form = form_of(source)
            first = first if number else form
            if form != first:
                raise ConfigError(
                    f"{path} has {form}, and {self._paths[0]} has {first} (name, dtype, shape of "
                    "a sample); files whose rows are concatenated must have the same columns"
                )
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, indices: Indices) -> Any:
        """These samples as one batch: from each file one gather of rows."""
        indices = np.asarray(indices, np.int64)
        if not len(indices):
            return self._part(0).take(indices)
        if not 0 <= indices.min() <= indices.max() < len(self):
            raise ConfigError(
                f"samples from {indices.min()} to {indices.max()} are not all from 0 to "
                f"{len(self) - 1}"
            )
        numbers = np.searchsorted(self._ends, indices, side="right")
        batch: Any = None
        outs: list[Any] = []
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            first = int(self._ends[number - 1]) if number else 0
            rows = self._part(int(number)).take(indices[places] - first)
            if len(places) == len(indices):
                return rows
            if not outs:
                batch = rows
                outs = [_room(len(indices), leaf) for _, leaf in leaves(rows)]
            for out, (_, leaf) in zip(outs, leaves(rows), strict=True):
                out[torch.from_numpy(places) if isinstance(out, torch.Tensor) else places] = leaf
        filled = iter(outs)
        return map_leaves(lambda _: next(filled), batch)

    def __getstate__(self) -> dict[str, Any]:
        """Without the open files: the receiver opens them again."""
        return {**self.__dict__, "_sources": OrderedDict()}

    def _part(self, number: int) -> Source:
        if number not in self._sources:
            while len(self._sources) >= most_mapped():
                self._sources.popitem(last=False)
            self._sources[number] = self._open(self._paths[number])
        self._sources.move_to_end(number)
        return self._sources[number]


def _room(num_rows: int, leaf: Any) -> Any:
    shape = (num_rows, *leaf.shape[1:])
    if isinstance(leaf, torch.Tensor):
        return torch.empty(shape, dtype=leaf.dtype)
    return np.empty(shape, leaf.dtype)


def form_of(source: Source) -> Form:
    """What a batch consists of, seen on one without rows: name, dtype, shape of a sample."""
    batch = source.take(np.empty(0, np.int64))
    return [(name, str(leaf.dtype), tuple(leaf.shape[1:])) for name, leaf in leaves(batch)]


def find_parts(folder: Path) -> list[Path]:
    """The `.npz` or `.pt` files of a folder, by name, numbers by their size; none is no error.

    Raises:
        ConfigError: there are files of both kinds.
    """
    found = [path for path in folder.iterdir() if path.suffix in _PARTS and path.is_file()]
    kinds = sorted({".pt" if path.suffix == ".pth" else path.suffix for path in found})
    if len(kinds) > 1:
        raise ConfigError(
            f"{folder} has {' and '.join(kinds)} files; keep one kind in a folder, or list the "
            "files: rows=[...]"
        )
    return sorted(found, key=lambda path: _natural(path.name))


def _natural(name: str) -> list[tuple[int, str]]:
    """So that part-2 comes before part-10."""
    pieces = re.split(r"(\d+)", name)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]


_CONTAINERS: dict[str, type[Hdf5] | type[Zarr] | type[NetCdf]] = {
    ".h5": Hdf5,
    ".hdf5": Hdf5,
    ".he5": Hdf5,
    ".zarr": Zarr,
    ".nc": NetCdf,
    ".nc4": NetCdf,
}


@dataclass(frozen=True, slots=True)
class Named:
    """Which files a data set consists of, and how they belong together."""

    paths: tuple[Path, ...]
    join: Literal["rows", "columns"] | None = None
    """How several files are combined; None for one file or folder."""
    names: tuple[str, ...] | None = None
    """Of one file, or of parts: which arrays. Of columns: what they are called."""


@takes_timeout
def files(
    world: World,
    *paths: str | Path,
    rows: Sequence[str | Path] | None = None,
    columns: Sequence[str | Path] | Mapping[str, str | Path] | None = None,
    timeout_s: float | None = None,
) -> Source:
    """Collective: open a data set that every rank can read; the arguments must match.

    Args:
        world: The ranks.
        paths: One file, or one folder of shards or of `.npz` or `.pt` files.
        rows: Instead: several files whose rows follow each other.
        columns: Which arrays of the file, the folder or `rows`; None takes all that are as long as
            the longest. Without those: the files that are the columns, `.npy` or `.pt` with one
            array each; a list makes tuples, a dict makes dicts of batches.
        timeout_s: How long to wait for missing ranks.
            None: as long as the world waits for any rank.

    Returns:
        A source for a loader; a rank reads only the samples that it takes.

    Raises:
        DataError: on all ranks, when a file is missing or broken on some; it is named.
        ConfigError: on all ranks, when the arguments are wrong.
    """
    timeout_s = world.watching.limit_s(timeout_s)
    source: Source | None = None
    form: list[tuple[str, str, tuple[int, ...]]] = []
    trouble: dict[type[HpcTrainError], str] = {}
    try:
        named = name_files("files", paths, rows, columns)
        source = open_named(named, part=(world.rank, world.size))
        form = form_of(source)
    except (ConfigError, DataError) as error:
        trouble[type(error)] = str(error)
    except Exception as error:  # each library has its own, and the other ranks wait
        told = ", ".join(map(str, paths or rows or columns or ()))
        trouble[DataError] = f"{told} cannot be opened ({type(error).__name__}: {error})"
    agree(world.comm, trouble.get(DataError), error=DataError, timeout_s=timeout_s)
    agree(world.comm, trouble.get(ConfigError), error=ConfigError, timeout_s=timeout_s)
    opened = cast(Source, source)  # or this rank would have had trouble
    found = {"number of samples": len(opened), "columns (name, dtype, shape of a sample)": form}
    require_alike(world, "files", found, timeout_s=timeout_s)
    return opened


def name_files(
    call: str,
    paths: Sequence[str | Path],
    rows: Sequence[str | Path] | None = None,
    columns: Sequence[str | Path] | Mapping[str, str | Path] | None = None,
) -> Named:
    """What a user says of files, taken for what it means. Pure.

    Raises:
        ConfigError: it can mean two things, or nothing.
    """
    for name, given in (("rows", rows), ("columns", columns)):
        if isinstance(given, str | Path):
            spelled = _spell_pattern(given) if _is_pattern(given) else f"[{str(given)!r}]"
            raise ConfigError(f"{name}={str(given)!r} must be a list, as in {name}={spelled}")
        if given is not None and not given:
            raise ConfigError(f"{name}= is empty; leave it out, or name at least one")
    named: list[object] = [*paths, *(rows or ())]
    if not paths and rows is None and columns is not None:  # else they are names of arrays
        named += columns.values() if isinstance(columns, Mapping) else columns
    for one in named:
        if isinstance(one, list | tuple) and one:
            raise ConfigError(_both_spellings(call, one, "were given as one list"))
        if not isinstance(one, str | os.PathLike):
            raise ConfigError(
                f"{call}: {one!r} is of type {type(one).__name__}, and must be the path of a "
                "file: a text or a pathlib.Path"
            )
    if len(paths) > 1:
        raise ConfigError(_both_spellings(call, paths, "can be parts of the rows or columns"))
    if paths and rows is not None:
        raise ConfigError(f"{paths[0]} and rows= are both given; name all files in rows=")
    if paths or rows is not None:
        if isinstance(columns, Mapping):
            raise ConfigError("columns= of a file are a list of names; a dict names files")
        names = None if columns is None else tuple(map(str, columns))
        if rows is not None:
            return Named(tuple(map(Path, rows)), "rows", names)
        return Named((Path(paths[0]),), None, names)
    if columns is None:
        raise ConfigError(
            f"{call} got no file; give a path, rows=[...] (files whose rows follow each "
            "other) or columns=[...] (files with one array each)"
        )
    if isinstance(columns, Mapping):
        return Named(tuple(map(Path, columns.values())), "columns", tuple(columns))
    return Named(tuple(map(Path, columns)), "columns")


def _is_pattern(path: str | Path) -> bool:
    """Whether this is meant to stand for several files."""
    return any(sign in str(path) for sign in "*?[") and not Path(path).exists()


def _spell_pattern(pattern: str | Path) -> str:
    return f"sorted(glob.glob({str(pattern)!r}))"


def _both_spellings(call: str, paths: Sequence[str | Path], what: str) -> str:
    shown = [str(path) for path in paths[:2]]
    listed = ", ".join(map(repr, shown)) + (", ..." if len(paths) > 2 else "")
    return (
        f"{call}(world, {listed}): several files {what}; write {call}(world, rows=[{listed}]) "
        f"where the rows of one file follow those of the other, or {call}(world, "
        f"columns=[{listed}]) where row i of each file belongs to sample i"
    )


def open_named(named: Named, *, part: tuple[int, int] = (0, 1)) -> Source:
    """Open a data set on this rank alone.

    Args:
        named: Which files.
        part: Of a folder of shards, look only at each `part[1]`-th file, from `part[0]` on.
    """
    if named.join == "rows":
        return _open_rows(named.paths, named.names)
    if named.join == "columns":
        return _open_columns(named)
    return open_path(named.paths[0], columns=named.names, part=part)


def name_columns(call: str, paths: Sequence[str | Path]) -> Named:
    """Several files as columns, where they cannot be meant as parts of the rows.

    Raises:
        ConfigError: they differ in length, or have samples of one kind: they may well be parts.
    """
    arrays = [_open_array(Path(path)) for path in paths]
    lengths = [len(array) for array in arrays]
    kinds = {(str(array.dtype), tuple(array.shape[1:])) for array in arrays}
    if len(set(lengths)) > 1:
        what = f"have {lengths} rows, so they are not columns of one data set"
        raise ConfigError(_both_spellings(call, paths, what))
    if len(kinds) == 1:
        dtype, shape = next(iter(kinds))
        what = f"hold samples of one kind ({dtype}, {shape}), so they may be parts or columns"
        raise ConfigError(_both_spellings(call, paths, what))
    return Named(tuple(map(Path, paths)), "columns")


def _open_rows(paths: Sequence[Path], names: Sequence[str] | None) -> Source:
    return RowParts(paths, partial(open_path, columns=names))


def _open_columns(named: Named) -> Source:
    arrays = [_open_array(path) for path in named.paths]
    lengths = {str(path): len(array) for path, array in zip(named.paths, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise ConfigError(
            f"columns= have different numbers of rows: {told}; files whose rows follow each other "
            "are rows=[...]"
        )
    if named.names is None:
        return ArraySource(tuple(arrays))
    return ArraySource(dict(zip(named.names, arrays, strict=True)))


def _open_array(path: Path) -> Any:
    """A file that holds one array."""
    array: Any = None
    if path.suffix == ".npy":
        array = open_npy(path)
    elif path.suffix in PT:
        array = open_pt(path)
    if isinstance(array, dict | tuple) or array is None:
        raise ConfigError(
            f"{path}: columns= takes files with one array each, .npy or .pt; of a file that holds "
            "several, pass the path, and columns= with their names"
        )
    if not array.shape:
        raise ConfigError(f"{path} has one number, and no axis of samples")
    return array


def open_path(
    path: Path, *, columns: Sequence[str] | None = None, part: tuple[int, int] = (0, 1)
) -> Source:
    """Open one file, or one folder of shards, on this rank alone."""
    if not path.exists():
        if _is_pattern(path):
            raise DataError(
                f"{path} is missing; patterns are not expanded here: write rows="
                f"{_spell_pattern(path)} where the rows of one file follow those of the other"
            )
        raise DataError(f"{path} is missing")
    if (path / MANIFEST).is_file():  # whatever the folder is called
        return Shards(path, columns=columns, part=part)
    if path.suffix in _CONTAINERS:
        return _CONTAINERS[path.suffix](path, columns)
    if path.is_dir():
        parts = find_parts(path)
        if not parts:
            raise DataError(_no_shards(path))
        return _open_rows(parts, columns)
    if path.name == MANIFEST:
        return Shards(path.parent, columns=columns, part=part)
    if path.suffix == ".npz":
        return ArraySource(_pick(path, open_npz(path), columns))
    if path.suffix == ".npy" or path.suffix in PT:
        content = open_npy(path) if path.suffix == ".npy" else open_pt(path)
        if isinstance(content, dict):
            return ArraySource(_pick(path, content, columns))
        if columns is not None:
            held = "a tuple of tensors" if isinstance(content, tuple) else "one array"
            raise ConfigError(f"{path} is {held}; leave columns= out")
        return ArraySource(content)
    known = ", ".join([".npy, .npz", *PT, *_CONTAINERS])
    raise ConfigError(f"{path}: what {path.suffix!r} files hold is unknown; known are {known}")


def _no_shards(folder: Path) -> str:
    """Why a folder is not a data set, and what to do about its contents."""
    told = f"{folder / MANIFEST} is missing"
    arrays = sorted(path for path in folder.iterdir() if path.suffix == ".npy")
    if not arrays:
        return (
            f"{told}, and the folder has no .npz or .pt files: it is not a data set; write one "
            "with "
            "`hpctrain data shard FILE --to FOLDER`"
        )
    listed = ", ".join(repr(str(path)) for path in arrays[:2])
    listed += ", ..." if len(arrays) > 2 else ""
    return (
        f"{told}: incomplete shards are rewritten by `hpctrain data "
        f"shard`; for single .npy files say how to combine them: rows=[{listed}] or "
        f"columns=[{listed}]"
    )


def _pick(path: Path, arrays: dict[str, Any], columns: Sequence[str] | None) -> dict[str, Any]:
    lengths = {name: array.shape[0] for name, array in arrays.items() if array.shape}
    return {name: arrays[name] for name in choose_columns(path, lengths, columns)}


def inspect(path: Path) -> dict[str, Any]:
    """Describe a file or a folder of shards as plain data.

    Raises:
        DataError: it is missing or broken; the message names the file.
        ConfigError: what the file holds is unknown.
    """
    if path.suffix == ".npy" and path.is_file():
        return _of_arrays("npy", {"data": open_npy(path)}, path)
    if path.suffix == ".npz" and path.is_file():
        return _of_arrays("npz", open_npz(path), path)
    source = open_path(path)
    if isinstance(source, Shards):
        manifest = source.manifest
        columns = [
            {"name": c.name, "dtype": c.dtype, "shape": list(c.shape)} for c in manifest.columns
        ]
        return {
            "kind": "shards",
            "num_samples": manifest.num_samples,
            "num_shards": len(manifest.shards),
            "num_bytes": manifest.num_bytes,
            "columns": columns,
        }
    if isinstance(source, Container):
        described = source.describe().items()
        columns = [
            {"name": name, "dtype": dtype, "shape": list(shape[1:])}
            for name, (dtype, shape) in described
        ]
        return _result(type(source).__name__.lower(), len(source), columns, path)
    columns = [
        {"name": name.strip("[']") or "data", "dtype": dtype, "shape": list(shape)}
        for name, dtype, shape in form_of(source)
    ]
    kind = "parts" if isinstance(source, RowParts) else path.suffix.removeprefix(".")
    return _result(kind, len(source), columns, path)


def _of_arrays(kind: str, arrays: dict[str, np.ndarray], path: Path) -> dict[str, Any]:
    columns = [
        {"name": name, "dtype": describe_dtype(array.dtype), "shape": list(array.shape[1:])}
        for name, array in arrays.items()
    ]
    lengths = [array.shape[0] for array in arrays.values() if array.ndim]
    return _result(kind, max(lengths, default=0), columns, path)


def _result(kind: str, num_samples: int, columns: list[Any], path: Path) -> dict[str, Any]:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {
        "kind": kind,
        "num_samples": num_samples,
        "num_shards": None,
        "num_bytes": sum(file.stat().st_size for file in files),
        "columns": columns,
    }
