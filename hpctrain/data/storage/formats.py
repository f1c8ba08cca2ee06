"""File formats: numpy's and torch's own as arrays; HDF5, Zarr and NetCDF behind their libraries.

Each process opens a container for itself, when it first reads, and keeps it open: a handle that
was inherited by a fork, or in a pickle, is never used. Read-only. A library is loaded when it is
used.
"""

from __future__ import annotations

import importlib
import math
import os
import pickle
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hpctrain.data.partition import Indices
from hpctrain.errors import ConfigError, DataError

__all__ = [
    "SUFFIXES",
    "Container",
    "Hdf5",
    "NetCdf",
    "Zarr",
    "choose_columns",
    "explain",
    "open_npy",
    "open_npz",
    "open_pt",
]


_HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def open_npy(path: Path) -> np.ndarray:
    """Map a `.npy` file into memory, read-only: only what is used is read.

    Raises:
        DataError: it is missing, truncated or no such file.
    """
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} {explain(path, error)}") from error
    return array


def open_npz(path: Path) -> dict[str, np.ndarray]:
    """Open a `.npz` archive: what is stored as it is is mapped, what is compressed is read.

    Raises:
        DataError: it is missing, truncated or no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            whole = np.memmap(path, np.uint8, "r")
            return {
                info.filename.removesuffix(".npy"): _open_member(archive, info, file, whole)
                for info in members
            }
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} {explain(path, error)}") from error


def _open_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: BinaryIO, whole: np.ndarray
) -> np.ndarray:
    """One array of an archive: a view of the mapped file, or a copy where it cannot be one."""
    if info.compress_type == zipfile.ZIP_STORED:
        file.seek(info.header_offset + 26)  # of the lengths of the name and of what follows it
        skipped = sum(struct.unpack("<HH", file.read(4)))
        file.seek(info.header_offset + 30 + skipped)
        version = np.lib.format.read_magic(file)
        if version in _HEADERS:
            shape, is_fortran, dtype = _HEADERS[version](file)
            start, num_bytes = file.tell(), dtype.itemsize * math.prod(shape)
            if not dtype.hasobject and num_bytes and start + num_bytes <= len(whole):
                flat = whole[start : start + num_bytes].view(dtype)
                mapped: np.ndarray = flat.reshape(shape, order="F" if is_fortran else "C")
                return mapped
    with archive.open(info) as member:
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
    return array


def explain(path: Path, error: Any) -> str:
    """Why a file cannot be used."""
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, PermissionError | IsADirectoryError):
        return f"cannot be read ({error.strerror})"
    if isinstance(error, ValueError) and str(error).startswith("Object arrays"):
        return "holds Python objects, which are not loaded: loading them runs code"
    try:
        size = f"{path.stat().st_size} bytes"
    except OSError:
        size = "no bytes"
    # Whatever numpy does not know at all it takes for a pickle, which would mislead.
    why = "unknown content" if "pickle" in str(error) else str(error)
    return f"is truncated, or its format does not match its name ({size}; {why})"


SUFFIXES = (".pt", ".pth")


def open_pt(path: Path) -> torch.Tensor | dict[str, torch.Tensor] | tuple[torch.Tensor, ...]:
    """Map a `.pt` file into memory: one tensor, or a dict or tuple of them, one a column.

    Files of torch before 1.6 cannot be mapped and are read into memory.

    Raises:
        DataError: it is missing, broken, or holds something else.
    """
    try:
        content = _load(path)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        if isinstance(error, pickle.UnpicklingError) and "unsupported global" in str(error).lower():
            raise DataError(
                f"{path} holds Python objects, which are not loaded: loading them runs code; save "
                "a tensor, or a dict or tuple of tensors"
            ) from error
        told = "unknown content" if isinstance(error, pickle.UnpicklingError) else error
        raise DataError(f"{path} {explain(path, told)}") from error
    if isinstance(content, torch.Tensor):
        return content
    if isinstance(content, dict):
        columns = {str(name): v for name, v in content.items() if isinstance(v, torch.Tensor)}
        if columns:
            return columns
    parts = content if isinstance(content, tuple) else ()
    if parts and all(isinstance(part, torch.Tensor) for part in parts):
        return parts
    raise DataError(
        f"{path} holds a {type(content).__name__} that is not a table of samples; save a tensor, "
        "or a dict or tuple of tensors whose first axis is the samples"
    )


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used with files saved with" not in str(error):
            raise
    return torch.load(path, map_location="cpu", weights_only=True)


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
        """Without the handle: the receiver opens the file again."""
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
                    f"{self.path} is truncated, or its format does not match its name ({error})"
                ) from error
            self._pid = os.getpid()
        return self._arrays(self._handle)


def choose_columns(
    path: Path, lengths: dict[str, int], columns: Sequence[str] | None
) -> Sequence[str]:
    """Which arrays of a file are its columns: those requested, or all as long as the longest. Pure.

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
    """Rows in ascending order: one range if they are contiguous, else a selection."""
    if len(wanted) == 0:
        return np.asarray(array[0:0])
    first, last = int(wanted[0]), int(wanted[-1])
    if not 0 <= first <= last < array.shape[0]:
        raise ConfigError(f"samples from {first} to {last} are not all from 0 to {len(array) - 1}")
    if last - first + 1 == len(wanted):
        return np.asarray(array[first : last + 1])
    if last - first < 2 * len(wanted):  # nearly contiguous: read the range once
        return np.asarray(np.asarray(array[first : last + 1])[wanted - first])
    if hasattr(array, "oindex"):
        return np.asarray(array.oindex[wanted])
    return np.asarray(array[wanted])


class Hdf5(Container):
    """An HDF5 file; datasets in groups are named `group/dataset`."""

    package = "h5py"

    def _open(self, library: Any) -> Any:
        # No lock: many ranks read at once, and some parallel file systems have none.
        return library.File(self.path, "r", locking=False)

    def _arrays(self, handle: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def note(name: str, node: Any) -> None:
            if hasattr(node, "dtype") and node.shape is not None:
                found[name] = node

        handle.visititems(note)
        return found


class Zarr(Container):
    """A Zarr group or array in a folder."""

    package = "zarr"

    def _open(self, library: Any) -> Any:
        return library.open(store=str(self.path), mode="r")

    def _arrays(self, handle: Any) -> dict[str, Any]:
        if hasattr(handle, "shape"):
            return {"data": handle}
        # Zarr finds them side by side, in an order that differs from one process to the next.
        return dict(sorted(handle.arrays()))


class NetCdf(Container):
    """A NetCDF file; values come as they are stored, without masks, scales or calendars."""

    package = "netCDF4"

    def _open(self, library: Any) -> Any:
        handle = library.Dataset(str(self.path), "r")
        handle.set_auto_maskandscale(False)
        return handle

    def _arrays(self, handle: Any) -> dict[str, Any]:
        return dict(handle.variables)
