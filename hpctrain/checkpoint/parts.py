"""What writers write: tree.json, safetensors files in memory, and packed trees. No communication.

`tree.json` has the structure of a state, and where each tensor's bytes are. A part is a plain
safetensors file, made in memory that is used again for the next save. What one rank alone knows is
packed: the length of its tree as JSON (8 bytes, the lowest first), the JSON, the bytes of its
tensors.
"""

from __future__ import annotations

import itertools
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.layout import Item, Source, TensorSlice, divide
from hpctrain.checkpoint.tree import (
    Flat,
    Wanted,
    dtype_name,
    flatten,
    named_dtype,
    safetensors_name,
    unflatten,
)
from hpctrain.errors import CheckpointError
from hpctrain.pieces import Region

__all__ = [
    "FileRange",
    "Image",
    "Staging",
    "TensorSpec",
    "Tree",
    "bytes_of",
    "describe",
    "items_of",
    "lay_out",
    "own_key",
    "pack",
    "parse_tree",
    "render_tree",
    "unpack",
]

_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class FileRange:
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
    places: Mapping[Region, tuple[FileRange, ...]]
    """Where its bytes are, by block. A tensor that every rank held is one block."""

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return sum(place.num_bytes for places in self.places.values() for place in places)


@dataclass(frozen=True, slots=True)
class Tree:
    """What `tree.json` says."""

    skeleton: Any
    tensors: Mapping[str, TensorSpec]


def items_of(tensors: Mapping[str, Tensor]) -> tuple[Item, ...]:
    """Tensors as what the layout needs to know of them."""
    return tuple(
        Item(name=name, num_elements=tensor.numel(), element_bytes=tensor.element_size())
        for name, tensor in tensors.items()
    )


def describe(flat: Flat) -> Tree:
    """What `tree.json` says of a state, but for where its tensors are; holds on to none of them."""
    specs = {
        name: TensorSpec(dtype_name(dtype), shape, {})
        for name, (dtype, shape) in flat.kinds.items()
    }
    return Tree(flat.skeleton, specs)


def render_tree(state: Tree, parts: Sequence[Sequence[TensorSlice]]) -> str:
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
        name: {"dtype": spec.dtype, "shape": spec.shape}
        | ({"pieces": blocks[name]} if name in blocks else {"places": whole[name]})
        for name, spec in state.tensors.items()
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
        raise CheckpointError(f"{path} is not the tree of a checkpoint ({error!r})") from error


def _parse_places(spec: Mapping[str, Any]) -> dict[Region, tuple[FileRange, ...]]:
    blocks = spec.get("pieces")
    if blocks is None:
        blocks = [{**Region.whole(spec["shape"])._asdict(), "places": spec["places"]}]
    return {
        Region(tuple(block["offset"]), tuple(block["shape"])): tuple(
            FileRange(*map(int, place)) for place in block["places"]
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
            f"{next(iter(flat.pieces))} is a piece of a tensor, but a rank's own state takes "
            "whole tensors only; put it into the state"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """What stands where in a file."""

    header: bytes
    starts: tuple[int, ...]
    """Where each piece begins, counted from the end of the header."""
    own_starts: Mapping[int, int]
    num_bytes: int
    """Of the whole file."""


def own_key(rank: int) -> str:
    """What a rank's own state is called in its file."""
    return f"own/{rank}"


def lay_out(segments: Sequence[TensorSlice], flat: Flat, own: Mapping[int, bytes]) -> Image:
    """Where everything goes: segments in their order, then what ranks alone know. Pure."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    kinds = flat.kinds
    starts = []
    end = 0
    for segment in segments:
        dtype, shape = kinds[segment.name]
        if segment.region is not None:
            shape = segment.region.shape
        elif not segment.is_whole:
            shape = (segment.stop - segment.start,)
        name = safetensors_name(dtype)
        starts.append(end)
        entries[segment.key] = {
            "dtype": name or "U8",
            "shape": list(shape) if name else [segment.num_bytes],
            "data_offsets": [end, end + segment.num_bytes],
        }
        end += segment.num_bytes
    own_starts = {}
    for rank, blob in own.items():
        own_starts[rank] = end
        entries[own_key(rank)] = {
            "dtype": "U8",
            "shape": [len(blob)],
            "data_offsets": [end, end + len(blob)],
        }
        end += len(blob)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return Image(
        header=header, starts=tuple(starts), own_starts=own_starts, num_bytes=len(header) + end
    )


class Staging:
    """Memory that holds a file until it is written. Grows when it must, never shrinks."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._is_pinned = False

    def fill(
        self,
        image: Image,
        segments: Sequence[TensorSlice],
        tensors: Mapping[Source, Tensor],
        own: Mapping[int, bytes],
    ) -> memoryview:
        """Copy a file's content; afterwards the tensors may change.

        Segments that no tensor is given for are left out: their holders send them.

        Returns:
            The file's bytes, valid until the next call.
        """
        here = [
            (segment, start, tensors[segment.source])
            for segment, start in zip(segments, image.starts, strict=True)
            if segment.num_bytes and segment.source in tensors
        ]
        on_gpu = [tensor.device for _, _, tensor in here if tensor.device.type == "cuda"]
        memory = self._take(image.num_bytes, pinned=bool(on_gpu))
        base = len(image.header)
        view = memory.numpy().data
        view[:base] = image.header
        for segment, start, tensor in here:
            room = memory[base + start : base + start + segment.num_bytes]
            _copy(tensor, segment, room)
        for rank, start in image.own_starts.items():
            view[base + start : base + start + len(own[rank])] = own[rank]
        for device in set(on_gpu):
            torch.cuda.synchronize(device)
        return view[: image.num_bytes]

    def _take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        if (
            self._memory is None
            or len(self._memory) < num_bytes
            or (pinned and not self._is_pinned)
        ):
            self._memory = None  # before the new one is there
            self._memory = _pinned(num_bytes) if pinned else _huge_pages(num_bytes)
            self._is_pinned = pinned
        return self._memory


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _huge_pages(num_bytes: int) -> Tensor:
    """Zeroed memory in pages as large as the kernel has them: copying into it is faster."""
    mapped = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    """A copy of a tensor's bytes on the CPU, in row-major order."""
    data = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
    segment = TensorSlice(
        name="", start=0, stop=tensor.numel(), element_bytes=tensor.element_size(), is_whole=True
    )
    _copy(tensor, segment, data)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return data


def _copy(tensor: Tensor, segment: TensorSlice, room: Tensor) -> None:
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # As bytes: some dtypes can be stored and viewed, but not copied.
        flat = tensor.reshape(-1)
        if not segment.is_whole:
            flat = flat[segment.start : segment.stop]
        room.copy_(flat.view(torch.uint8), non_blocking=True)
    elif segment.is_whole:
        room.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
    else:
        flat = tensor.reshape(-1)[segment.start : segment.stop]
        room.view(tensor.dtype).copy_(flat, non_blocking=True)
