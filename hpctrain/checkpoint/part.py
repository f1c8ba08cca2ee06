"""One writer's file, a plain safetensors file, made in memory that is used again and again."""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.checkpoint.dtypes import safetensors_name
from hpctrain.checkpoint.flattening import Flat
from hpctrain.checkpoint.layout import Segment, Source
from hpctrain.checkpoint.manifest import BLOCK_BYTES, FileSpec

__all__ = [
    "Image",
    "Staging",
    "bytes_of",
    "lay_out",
    "own_key",
    "sync_directory",
    "write_part",
    "write_text",
]

_ALIGN_BYTES = 64
_CHUNK_BYTES = 2 << 20
"""A chunk is written and then checksummed while it is still in the processor's cache."""


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


def lay_out(segments: Sequence[Segment], flat: Flat, own: Mapping[int, bytes]) -> Image:
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
        segments: Sequence[Segment],
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
    segment = Segment(
        name="", start=0, stop=tensor.numel(), element_bytes=tensor.element_size(), is_whole=True
    )
    _copy(tensor, segment, data)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return data


def _copy(tensor: Tensor, segment: Segment, room: Tensor) -> None:
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


def write_part(path: Path, data: memoryview, *, data_start: int) -> FileSpec:
    """Write a file to the disk, not only to the kernel's memory, and say what it is."""
    blocks = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for start in range(0, len(data), BLOCK_BYTES):
            blocks.append(_write_block(descriptor, data[start : start + BLOCK_BYTES]))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileSpec(
        name=path.name, num_bytes=len(data), blocks=tuple(blocks), data_start=data_start
    )


def _write_block(descriptor: int, block: memoryview) -> str:
    checksum = 0
    for start in range(0, len(block), _CHUNK_BYTES):
        chunk = block[start : start + _CHUNK_BYTES]
        checksum = zlib.crc32(chunk, checksum)
        done = 0
        while done < len(chunk):
            done += os.write(descriptor, chunk[done:])
    return f"{checksum:08x}"


def write_text(path: Path, text: str) -> None:
    """Write a small file to the disk in one move: it is there with all of it, or not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
