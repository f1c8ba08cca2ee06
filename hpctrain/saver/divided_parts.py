"""The state of further parts of a run whose tensors are divided as its model is.

An average of the weights of a divided model has shards, or the tensors of its stage alone. In a
checkpoint it is whole, as one process would have it: each rank writes what it holds, and takes what
it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hpctrain.pieces import Piece, Region, is_sharded
from hpctrain.sharding import as_pieces, region_of, shard_like
from hpctrain.tensor_names import plain_name
from hpctrain.world import World

__all__ = ["join_divided", "take_divided", "wanted_of"]

_Path = tuple[Any, ...]
_Kind = tuple[tuple[int, ...], torch.dtype]


def join_divided(world: World, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Collective: a part's state with pieces where ranks hold different tensors.

    Args:
        world: The ranks.
        state: This rank's: plain values, tensors and shards in dictionaries.
    """
    own = dict(_tensors(state))
    kinds: dict[_Path, _Kind] = {
        path: (tuple(tensor.shape), tensor.dtype) for path, tensor in own.items()
    }
    everyone: list[dict[_Path, _Kind]] = world.comm.allgather(kinds)
    joined: Any = as_pieces(state) if any(map(is_sharded, own.values())) else state
    for path in dict.fromkeys(path for told in everyone for path in told):
        holders = [told[path] for told in everyone if path in told]
        if len(holders) == world.size:
            continue
        shape, dtype = holders[0]
        piece = Piece(torch.empty(0, dtype=dtype), 0, shape)
        if path in own:
            held = _at(joined, path)
            piece = held if isinstance(held, Piece) else Piece(held, (0,) * held.dim(), shape)
        joined = _with(joined, path, piece)
    return joined  # type: ignore[no-any-return]


def wanted_of(
    state: Mapping[str, Any], *, takes_all: bool
) -> Callable[[str, tuple[int, ...]], Region | range | None]:
    """Which part of each saved tensor this rank wants; None: all of it.

    Args:
        state: This rank's, as it is before.
        takes_all: Whether saved tensors that are not in it are wanted; another stage's are not.
    """
    own = {plain_name("/".join(map(str, path))): tensor for path, tensor in _tensors(state)}

    def wanted(place: str, shape: tuple[int, ...]) -> Region | range | None:
        tensor = own.get(place)
        if tensor is None:
            return None if takes_all else range(0)
        fits = is_sharded(tensor) and tuple(tensor.shape) == tuple(shape)
        return region_of(tensor) if fits else None

    return wanted


def take_divided(state: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's state out of a saved one: shards where it has shards, and no others' tensors."""
    return _take(state, saved, "")


def _take(own: Any, saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    for key, value in saved.items():
        mine = own.get(key) if isinstance(own, Mapping) else None
        if isinstance(value, Mapping):
            taken[key] = _take(mine, value, f"{name}{key}/")
        elif isinstance(mine, Tensor) and is_sharded(mine):
            taken[key] = shard_like(mine, value, f"{name}{key}")
        elif not isinstance(value, Piece):
            taken[key] = value
        elif mine is not None:
            taken[key] = value.tensor
    return taken


def _tensors(tree: Any, path: _Path = ()) -> Iterator[tuple[_Path, Tensor]]:
    """All tensors of nested dictionaries, by the keys that lead to them."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, (*path, key))


def _at(tree: Any, path: _Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _with(tree: Any, path: _Path, value: Any) -> Any:
    """A tree with another value in one place."""
    if not path:
        return value
    inner = tree.get(path[0]) if isinstance(tree, Mapping) else None
    return {**(tree or {}), path[0]: _with(inner, path[1:], value)}
