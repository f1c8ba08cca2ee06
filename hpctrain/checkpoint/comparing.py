"""What a rank wants of a checkpoint, and whether the checkpoint has it. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpctrain.checkpoint.flattening import Flat, flatten
from hpctrain.checkpoint.tree_file import Tree
from hpctrain.checkpoint.unflattening import Ask, Wanted
from hpctrain.errors import CheckpointError
from hpctrain.pieces import Region
from hpctrain.tensor_names import plain_keys, plain_name

__all__ = ["Cut", "differences", "flatten_like", "refuse_misfit", "tensor_shapes", "want"]

_Shape = tuple[int, ...]
Cut = Callable[[str, _Shape], Region | range | None]
"""Which part of a tensor this rank wants, by its place under a key (`0/exp_avg`) and its shape: a
block, elements counted flat, or None for all of it."""


def flatten_like(like: Mapping[str, object] | None) -> dict[str, Flat | Cut]:
    """What `load` was asked for, by key of the state.

    Raises:
        CheckpointError: a tree holds something that no checkpoint does, or a piece is wrong.
    """
    return {
        key: wanted if callable(wanted) else flatten(wanted) for key, wanted in (like or {}).items()
    }


def refuse_misfit(tree: Tree, like: Mapping[str, Flat | Cut]) -> None:
    """Compare the tensors under certain keys of a checkpoint with those that are here.

    Raises:
        CheckpointError: they have other names or shapes; the first differences are named.
    """
    stored = {name: spec.shape for name, spec in tree.tensors.items()}
    for key, wanted in like.items():
        found = tensor_shapes(tree.skeleton, stored, key)
        if found is None:
            raise CheckpointError(f"it holds no {key}")
        if not isinstance(wanted, Flat):
            continue
        shapes = {name: shape for name, (_, shape) in wanted.kinds.items()}
        here = tensor_shapes(wanted.skeleton, shapes) or {}
        wrong = differences(plain_keys(found), plain_keys(here))
        if wrong:
            raise CheckpointError(f"its {key} is of another model: {'; '.join(wrong)}")


def want(tree: Tree, like: Mapping[str, Flat | Cut]) -> tuple[Any, list[Wanted]]:
    """The skeleton with what is asked for as pieces, and all tensors and pieces that are in it.

    Raises:
        CheckpointError: a piece lies outside of its tensor.
    """
    kept: set[str] = set()
    asks: dict[Ask, None] = {}
    found: set[str] = set()

    def choose(node: Any, place: str, cut: Cut) -> Any:
        name = node["name"]
        ask = _ask(name, place, tree.tensors[name].shape, cut)
        found.add(name)
        if ask is None:
            kept.add(name)
            return node
        asks[ask] = None
        return {**node, "name": ask}

    cuts = {
        key: _cut_like(wanted) if isinstance(wanted, Flat) else wanted
        for key, wanted in like.items()
    }

    def choose_at(node: Any, path: tuple[str, ...]) -> Any:
        cut = cuts.get(path[0], _nothing) if path else _nothing
        return choose(node, plain_name("/".join(path[1:])), cut)

    skeleton = _change(tree.skeleton, (), choose_at)
    whole = [name for name in tree.tensors if name in kept or name not in found]
    return skeleton, [*whole, *asks]


def _nothing(place: str, shape: _Shape) -> None:
    return None


def _cut_like(flat: Flat) -> Cut:
    """What a tree that is here wants: pieces where it has pieces."""
    places = {plain_name("/".join(place)): name for place, name in _tensors(flat.skeleton, ())}

    def cut(place: str, shape: _Shape) -> Region | range | None:
        piece = flat.pieces.get(places.get(place, ""))
        if piece is None:
            return None
        if isinstance(piece.offset, int):
            return range(piece.offset, piece.offset + piece.tensor.numel())
        return Region(tuple(piece.offset), tuple(piece.tensor.shape))

    return cut


def _ask(name: str, place: str, shape: _Shape, cut: Cut) -> Ask | None:
    wanted = cut(place, shape)
    if wanted is None:
        return None
    if isinstance(wanted, range):
        is_inside = 0 <= wanted.start <= wanted.stop <= Region.whole(shape).num_elements
        ask = Ask(name, wanted.start, (len(wanted),), shape)
        is_inside = is_inside and wanted.step == 1
    else:
        ends = zip(wanted.offset, wanted.shape, shape, strict=False)
        is_inside = len(wanted.offset) == len(wanted.shape) == len(shape) and all(
            0 <= a <= a + n <= m for a, n, m in ends
        )
        ask = Ask(name, wanted.offset, wanted.shape, shape)
    if not is_inside:
        raise CheckpointError(f"{wanted} of {name} was asked for, which has the shape {shape}")
    return ask


def _change(
    value: Any, path: tuple[str, ...], change: Callable[[Any, tuple[str, ...]], Any]
) -> Any:
    """A skeleton with every tensor changed."""
    if type(value) is list:
        return [_change(item, (*path, str(i)), change) for i, item in enumerate(value)]
    if type(value) is not dict:
        return value
    kind = value.get("$")
    if kind is None:
        return {key: _change(item, (*path, key), change) for key, item in value.items()}
    if kind == "tensor":
        return change(value, path)
    if kind in ("dict", "OrderedDict"):
        items = [[key, _change(item, (*path, str(key)), change)] for key, item in value["items"]]
        return {**value, "items": items}
    if kind == "tuple":
        return {**value, "items": _change(value["items"], path, change)}
    return value


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
