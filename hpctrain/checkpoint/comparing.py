"""Whether the tensors of a checkpoint are those of this model. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["differences", "tensor_shapes"]

_Shape = tuple[int, ...]


def differences(
    found: Mapping[str, _Shape], wanted: Mapping[str, _Shape], *, most: int = 5
) -> list[str]:
    """In words, where the tensors of a checkpoint are not those that are wanted.

    Args:
        found: Shapes by name in the checkpoint.
        wanted: Shapes by name here.
        most: How many differences to name; the rest is counted.

    Returns:
        Nothing if they fit.
    """
    texts: list[str] = []
    missing = [name for name in wanted if name not in found]
    surplus = [name for name in found if name not in wanted]
    for name in missing:
        near = difflib.get_close_matches(name, surplus, n=1) if len(texts) < most else []
        hint = f"; it has {near[0]} {_shape(found[near[0]])} instead" if near else ""
        texts.append(f"{name} {_shape(wanted[name])} is missing in it{hint}")
    texts += [
        f"{name} is {_shape(found[name])} in it and {_shape(shape)} here"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    texts += [f"it has {name} {_shape(found[name])}, which is not here" for name in surplus]
    if len(texts) > most:
        texts = [*texts[:most], f"and {len(texts) - most} more differences"]
    return texts


def _shape(shape: _Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"


def tensor_shapes(
    skeleton: Any, shapes: Mapping[str, _Shape], key: str | None = None
) -> dict[str, _Shape] | None:
    """The shape of every tensor in a tree, by its place; one in several places stands in each.

    Args:
        skeleton: The tree as JSON.
        shapes: Of the stored tensors, by name.
        key: Only what is under this key of the tree; None: everything.

    Returns:
        None if there is no such key.
    """
    if key is not None:
        top = dict(_children(skeleton))
        if key not in top:
            return None
        skeleton = top[key]
    return {"/".join(place) or "it": shapes[name] for place, name in _tensors(skeleton, ())}


def _tensors(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if type(value) is dict and value.get("$") == "tensor":
        yield place, value["name"]
        return
    for key, item in _children(value):
        yield from _tensors(item, (*place, key))


def _children(value: Any) -> list[tuple[str, Any]]:
    """What is directly inside a value of the tree, by key as text."""
    if type(value) is list:
        return [(str(index), item) for index, item in enumerate(value)]
    if type(value) is not dict:
        return []
    kind = value.get("$")
    if kind is None:
        return list(value.items())
    if kind in ("dict", "OrderedDict"):
        return [(str(key), item) for key, item in value["items"]]
    return _children(value["items"]) if kind == "tuple" else []
