"""`.npy` and `.npz`: numpy's own files, as arrays."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import DataError

__all__ = ["open_npy", "open_npz"]


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
    """Read a `.npz` archive into memory; it may be compressed, so it cannot be mapped.

    Raises:
        DataError: it is missing, truncated or no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} {explain(path, error)}") from error


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
