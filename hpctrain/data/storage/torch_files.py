"""`.pt`: tensors that `torch.save` wrote, loaded without running code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from hpctrain.data.storage.numpy_files import explain
from hpctrain.errors import DataError

__all__ = ["SUFFIXES", "open_pt"]

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
        f"{path} holds a {type(content).__name__} that is no table of samples; save a tensor, or "
        "a dict or tuple of tensors whose first axis is the samples"
    )


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used with files saved with" not in str(error):
            raise
    return torch.load(path, map_location="cpu", weights_only=True)
