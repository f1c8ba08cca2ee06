"""Data sets in files, opened the same way whatever they are."""

from __future__ import annotations

from hpctrain.data.storage.opening import files, open_path, open_paths

__all__ = ["files", "open_path", "open_paths"]
