"""What a data set consists of, without reading its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.storage.container import Container
from hpctrain.data.storage.manifest import describe_dtype
from hpctrain.data.storage.numpy_files import open_npy, open_npz
from hpctrain.data.storage.opening import open_path
from hpctrain.data.storage.row_parts import RowParts, form_of
from hpctrain.data.storage.shards import Shards

__all__ = ["inspect"]


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
