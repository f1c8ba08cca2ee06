"""Files that hold many arrays behind a library of their own: HDF5, Zarr, NetCDF.

Each process opens the file for itself, when it first reads, and keeps it open: a handle that came
by a fork, or in a pickle, is never used. Read-only.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.source import Indices
from hpctrain.errors import ConfigError, DataError

__all__ = ["Container", "choose_columns"]


class Container(ABC):
    """Some arrays of a file as a source; a batch is a dict by name.

    Args:
        path: The file.
        columns: Which arrays; None takes all that are as long as the longest.

    Raises:
        DataError: the file is missing or broken.
        ConfigError: a column is unknown, columns differ in length, or the library is not there.
    """

    package = ""
    """What must be installed to read it."""

    def __init__(self, path: Path, columns: Sequence[str] | None = None) -> None:
        self.path = path
        self._handle: Any = None
        self._pid = 0
        if not path.exists():
            raise DataError(f"{path} is missing")
        found = self._found()
        lengths = {name: array.shape[0] for name, array in found.items() if array.shape}
        self.names = tuple(choose_columns(path, lengths, columns))
        self._num_samples = int(lengths[self.names[0]])

    @abstractmethod
    def _open(self, library: Any) -> Any:
        """Open the file, read-only."""

    @abstractmethod
    def _arrays(self, handle: Any) -> dict[str, Any]:
        """The arrays in it, by name."""

    def __len__(self) -> int:
        return self._num_samples

    def take(self, indices: Indices) -> Any:
        """These samples as one batch, read in the order of the file and then put into theirs."""
        wanted, places = np.unique(np.asarray(indices, np.int64), return_inverse=True)
        found = self._found()
        return {name: _read(found[name], wanted)[places] for name in self.names}

    def describe(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each column."""
        found = self._found()
        return {name: (str(found[name].dtype), tuple(found[name].shape)) for name in self.names}

    def __getstate__(self) -> dict[str, Any]:
        """Without the handle: whoever gets this opens the file again."""
        return {**self.__dict__, "_handle": None, "_pid": 0}

    def _found(self) -> dict[str, Any]:
        if self._handle is None or self._pid != os.getpid():
            try:
                library = importlib.import_module(self.package)
            except ImportError as error:
                raise ConfigError(
                    f"{self.path} needs the package {self.package}, which is not installed; "
                    f"pip install {self.package}"
                ) from error
            try:
                self._handle = self._open(library)
            except Exception as error:  # each library has its own
                raise DataError(
                    f"{self.path} is truncated or not what its name says ({error})"
                ) from error
            self._pid = os.getpid()
        return self._arrays(self._handle)


def choose_columns(
    path: Path, lengths: dict[str, int], columns: Sequence[str] | None
) -> Sequence[str]:
    """Which arrays of a file are its columns: those asked for, or all as long as the longest. Pure.

    Raises:
        ConfigError: one is unknown, they differ in length, or there are none.
    """
    if columns is None:
        longest = max(lengths.values(), default=None)
        columns = [name for name, length in lengths.items() if length == longest]
    known = ", ".join(lengths) or "none"
    if not columns:
        raise ConfigError(f"{path} has no arrays with an axis of samples")
    unknown = [name for name in columns if name not in lengths]
    if unknown:
        raise ConfigError(f"{path} has no column {unknown[0]!r}; it has {known}")
    if len({lengths[name] for name in columns}) > 1:
        told = ", ".join(f"{name} {lengths[name]}" for name in columns)
        raise ConfigError(f"{path}: the columns have different numbers of samples: {told}")
    return columns


def _read(array: Any, wanted: np.ndarray) -> np.ndarray:
    """Rows in ascending order: one range where they are neighbours, else a selection."""
    if len(wanted) == 0:
        return np.asarray(array[0:0])
    first, last = int(wanted[0]), int(wanted[-1])
    if not 0 <= first <= last < array.shape[0]:
        raise ConfigError(f"samples from {first} to {last} are not all from 0 to {len(array) - 1}")
    if last - first + 1 == len(wanted):
        return np.asarray(array[first : last + 1])
    if last - first < 2 * len(wanted):  # nearly neighbours: read the range once
        return np.asarray(np.asarray(array[first : last + 1])[wanted - first])
    if hasattr(array, "oindex"):
        return np.asarray(array.oindex[wanted])
    return np.asarray(array[wanted])
