"""Batches and data sets as trees: arrays, alone or in tuples, lists and dicts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["as_tensor", "leaves", "map_leaves"]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with every leaf replaced; tuples stay named, and mappings become dicts."""
    if isinstance(tree, tuple):
        parts = [map_leaves(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [map_leaves(function, part) for part in tree]
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, part) for key, part in tree.items()}
    return function(tree)


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with a name that says where it is, such as `[0]['image']`."""
    if isinstance(tree, tuple | list):
        for number, part in enumerate(tree):
            yield from leaves(part, f"{name}[{number}]")
    elif isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from leaves(part, f"{name}[{key!r}]")
    else:
        yield name, tree


def as_tensor(leaf: Any) -> Any:
    """Sources give arrays or tensors; users get tensors wherever torch has the dtype."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    try:
        return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    except TypeError:
        return leaf
