"""Files whose rows follow each other: one source of many parts."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.data.source import Indices, Source
from hpctrain.data.storage.shards import most_mapped
from hpctrain.data.structure import leaves, map_leaves
from hpctrain.errors import ConfigError

__all__ = ["RowParts", "find_parts", "form_of"]

_PARTS = (".npz", ".pt", ".pth")
"""Files that name their arrays: in a folder of them each can only be a part of the rows."""

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
                    "a sample); files whose rows follow each other must be alike"
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
        """Without the open files: whoever gets this opens them again."""
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
            f"{folder} has {' and '.join(kinds)} files; keep one kind in a folder, or name the "
            "files: rows=[...]"
        )
    return sorted(found, key=lambda path: _natural(path.name))


def _natural(name: str) -> list[tuple[int, str]]:
    """So that part-2 comes before part-10."""
    pieces = re.split(r"(\d+)", name)
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in pieces]
