"""Data sets in files, opened the same way whatever they are."""

from __future__ import annotations

from hpctrain.data.storage.opening import (
    Named,
    files,
    name_columns,
    name_files,
    open_named,
    open_path,
)

__all__ = ["Named", "files", "name_columns", "name_files", "open_named", "open_path"]
