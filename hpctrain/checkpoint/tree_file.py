"""`tree.json`: the structure of a state, and where each tensor's bytes are. And packed trees. Pure.

What one rank alone knows is packed: the length of its tree as JSON (8 bytes, the lowest first), the
JSON, the bytes of its tensors.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.dtypes import dtype_name, named_dtype
from hpctrain.checkpoint.flattening import Flat, flatten
from hpctrain.checkpoint.layout import Item, Segment, divide
from hpctrain.checkpoint.part import Staging, lay_out
from hpctrain.checkpoint.unflattening import Wanted, unflatten
from hpctrain.errors import CheckpointError
from hpctrain.pieces import Region

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
    """Bytes of a block: which part, where behind its header, how many, and from which byte on."""

    part: int
    start: int
    num_bytes: int
    at: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    places: Mapping[Region, tuple[Place, ...]]
    """By block: where its bytes are. A tensor that every rank had is one block."""

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return sum(place.num_bytes for places in self.places.values() for place in places)


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
    shapes = {name: (dtype_name(kind), list(shape)) for name, (kind, shape) in flat.kinds.items()}
    return Described(flat.skeleton, shapes)


def render_tree(state: Described, parts: Sequence[Sequence[Segment]]) -> str:
    """As text; `parts` are the segments of each part, which follow each other without gaps."""
    whole: dict[str, list[list[int]]] = {name: [] for name in state.tensors}
    blocks: dict[str, list[dict[str, Any]]] = {}
    for number, segments in enumerate(parts):
        start = 0
        for segment in segments:
            at = segment.start * segment.element_bytes
            place = [number, start, segment.num_bytes, at]
            start += segment.num_bytes
            if segment.region is None:
                whole[segment.name].append(place)
            else:
                block = {**segment.region._asdict(), "places": [place]}
                blocks.setdefault(segment.name, []).append(block)
    for found in whole.values():
        found.sort(key=lambda place: place[3])
    for held in blocks.values():
        held.sort(key=lambda block: block["offset"])
    tensors = {
        name: {"dtype": dtype, "shape": shape}
        | ({"pieces": blocks[name]} if name in blocks else {"places": whole[name]})
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
                _parse_places(spec),
            )
            for name, spec in told["tensors"].items()
        }
        return Tree(told["state"], tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no tree of a checkpoint ({error!r})") from error


def _parse_places(spec: Mapping[str, Any]) -> dict[Region, tuple[Place, ...]]:
    blocks = spec.get("pieces")
    if blocks is None:
        blocks = [{**Region.whole(spec["shape"])._asdict(), "places": spec["places"]}]
    return {
        Region(tuple(block["offset"]), tuple(block["shape"])): tuple(
            Place(*map(int, place)) for place in block["places"]
        )
        for block in blocks
    }


def pack(tree: object) -> bytes:
    """A small tree as one piece of bytes.

    Raises:
        CheckpointError: something in it cannot be stored.
    """
    flat = flatten(tree)
    if flat.pieces:
        raise CheckpointError(
            f"{next(iter(flat.pieces))} is a piece of a tensor, and what one rank alone knows has "
            "whole ones; put it into the state"
        )
    (segments,) = divide(items_of(flat.tensors), 1)
    image = lay_out(segments, flat, {})
    text = render_tree(describe(flat), [segments]).encode()
    data = Staging().fill(image, segments, flat.sources, {})
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
    tensors: dict[Wanted, Tensor] = {}
    for name, spec in tree.tensors.items():
        made = torch.empty(spec.shape, dtype=named_dtype(spec.dtype))
        for place in itertools.chain.from_iterable(spec.places.values()):
            if place.num_bytes:
                room = made.reshape(-1).view(torch.uint8)
                room[place.at : place.at + place.num_bytes] = data[
                    place.start : place.start + place.num_bytes
                ]
        tensors[name] = made
    return unflatten(tree.skeleton, tensors)
