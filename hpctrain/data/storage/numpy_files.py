"""`.npy` and `.npz`: numpy's own files, as arrays."""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpctrain.errors import DataError

__all__ = ["explain", "open_npy", "open_npz"]

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
    """In words, why a file cannot be used."""
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
    return f"is truncated or not what its name says ({size}; {why})"
