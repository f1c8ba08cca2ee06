"""`tree.json`: the structure of a state, and where each tensor's bytes are. And packed trees. Pure.

What one rank alone knows is packed: the length of its tree as JSON (8 bytes, the lowest first), the
JSON, the bytes of its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.dtypes import dtype_name, named_dtype
from hpctrain.checkpoint.flattening import Flat, flatten
from hpctrain.checkpoint.layout import Item, Piece, divide
from hpctrain.checkpoint.part import Staging, lay_out
from hpctrain.checkpoint.unflattening import unflatten
from hpctrain.errors import CheckpointError

__all__ = [
    "Described",
    "Place",
    "TensorSpec",
    "Tree",
    "describe",
    "items_of",
    "pack",
    "parse_tree",
    "render_tree",
    "unpack",
]


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a tensor: which part, where behind its header, how many, and from which byte on."""

    part: int
    start: int
    num_bytes: int
    at: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """What `tree.json` says."""

    skeleton: Any
    tensors: Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class Described:
    """A state without its tensors: only what they are."""

    skeleton: Any
    tensors: Mapping[str, tuple[str, list[int]]]
    """By name: dtype and shape."""


def items_of(tensors: Mapping[str, Tensor]) -> tuple[Item, ...]:
    """Tensors as what the layout needs to know of them."""
    return tuple(
        Item(name=name, num_elements=tensor.numel(), element_bytes=tensor.element_size())
        for name, tensor in tensors.items()
    )


def describe(flat: Flat) -> Described:
    """What `tree.json` says of a state, without holding on to its tensors."""
    shapes = {name: (dtype_name(t.dtype), list(t.shape)) for name, t in flat.tensors.items()}
    return Described(flat.skeleton, shapes)


def render_tree(state: Described, parts: Sequence[Sequence[Piece]]) -> str:
    """As text; `parts` are the pieces of each part, which follow each other without gaps."""
    places: dict[str, list[list[int]]] = {name: [] for name in state.tensors}
    for number, pieces in enumerate(parts):
        start = 0
        for piece in pieces:
            at = piece.start * piece.element_bytes
            places[piece.name].append([number, start, piece.num_bytes, at])
            start += piece.num_bytes
    for found in places.values():
        found.sort(key=lambda place: place[3])
    tensors = {
        name: {"dtype": dtype, "shape": shape, "places": places[name]}
        for name, (dtype, shape) in state.tensors.items()
    }
    return json.dumps({"state": state.skeleton, "tensors": tensors}, separators=(",", ":"))


def parse_tree(text: bytes, path: object) -> Tree:
    """Read `tree.json`; `path` is for messages.

    Raises:
        CheckpointError: it is none.
    """
    try:
        told = json.loads(text)
        tensors = {
            name: TensorSpec(
                spec["dtype"],
                tuple(spec["shape"]),
                tuple(Place(*map(int, place)) for place in spec["places"]),
            )
            for name, spec in told["tensors"].items()
        }
        return Tree(told["state"], tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no tree of a checkpoint ({error!r})") from error


def pack(tree: object) -> bytes:
    """A small tree as one piece of bytes.

    Raises:
        CheckpointError: something in it cannot be stored.
    """
    flat = flatten(tree)
    (pieces,) = divide(items_of(flat.tensors), 1)
    image = lay_out(pieces, flat.tensors, {})
    text = render_tree(describe(flat), [pieces]).encode()
    data = Staging().fill(image, pieces, flat.tensors, {})
    return len(text).to_bytes(8, "little") + text + bytes(data[len(image.header) :])


def unpack(blob: bytes | memoryview) -> Any:
    """The tree that was packed.

    Raises:
        CheckpointError: these are not the bytes of one.
    """
    view = memoryview(blob)
    length = int.from_bytes(view[:8], "little")
    tree = parse_tree(bytes(view[8 : 8 + length]), "a packed tree")
    data = torch.frombuffer(bytearray(view[8 + length :] or b"\0"), dtype=torch.uint8)
    tensors = {}
    for name, spec in tree.tensors.items():
        made = torch.empty(spec.shape, dtype=named_dtype(spec.dtype))
        for place in spec.places:
            if place.num_bytes:
                room = made.reshape(-1).view(torch.uint8)
                room[place.at : place.at + place.num_bytes] = data[
                    place.start : place.start + place.num_bytes
                ]
        tensors[name] = made
    return unflatten(tree.skeleton, tensors)
