"""Checksums of files, block by block.

CRC-32 by zlib: it finds every flipped bit and every burst of up to 32 bits, every language has it,
and it is the fastest that Python brings (see docs/checkpoints.md for what was measured). It is no
protection against somebody who forges a checkpoint; nothing in one is ever executed.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from hpctrain.checkpoint.manifest import BLOCK_BYTES, FileSpec
from hpctrain.errors import CheckpointError

__all__ = ["check_block", "check_file", "checksums_of", "num_blocks", "read_block", "read_checked"]


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    """How many blocks a file has; an empty one has none."""
    return -(-num_bytes // block_bytes)


def checksums_of(data: bytes | memoryview, block_bytes: int = BLOCK_BYTES) -> tuple[str, ...]:
    """Of each block."""
    view = memoryview(data)
    starts = range(0, len(view), block_bytes)
    return tuple(f"{zlib.crc32(view[start : start + block_bytes]):08x}" for start in starts)


def read_block(descriptor: int, start: int, into: memoryview) -> int:
    """Read from `start` until `into` is full or the file ends; returns how much it was."""
    done = 0
    while done < len(into):
        number = os.preadv(descriptor, [into[done:]], start + done)
        if number == 0:
            break
        done += number
    return done


def check_block(path: Path, file: FileSpec, block: int, data: memoryview, block_bytes: int) -> None:
    """Compare a block with its checksum.

    Raises:
        CheckpointError: it is shorter than it should be, or other bytes stand there.
    """
    start = block * block_bytes
    wanted = min(block_bytes, file.num_bytes - start)
    if len(data) != wanted:
        raise CheckpointError(
            f"{path} is truncated: {start + len(data)} bytes of {file.num_bytes} are there"
        )
    if f"{zlib.crc32(data):08x}" != file.blocks[block]:
        raise CheckpointError(
            f"{path} is damaged: bytes {start} to {start + wanted} have another checksum than "
            "when they were written"
        )


def read_checked(folder: Path, file: FileSpec, block_bytes: int) -> Iterator[memoryview]:
    """Read a file block by block, each checked; a block is gone when the next is asked for.

    Raises:
        CheckpointError: the file is missing, truncated, longer than it should be, or damaged.
    """
    path = folder / file.name
    if len(file.blocks) != num_blocks(file.num_bytes, block_bytes):
        raise CheckpointError(f"{path} has {len(file.blocks)} checksums for {file.num_bytes} bytes")
    buffer = memoryview(bytearray(min(block_bytes, max(file.num_bytes, 1))))
    try:
        with path.open("rb", buffering=0) as opened:
            for block in range(len(file.blocks)):
                start = block * block_bytes
                room = buffer[: min(block_bytes, file.num_bytes - start)]
                data = room[: read_block(opened.fileno(), start, room)]
                check_block(path, file, block, data, block_bytes)
                yield data
            size = os.fstat(opened.fileno()).st_size
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    if size != file.num_bytes:
        raise CheckpointError(f"{path} has {size} bytes; {file.num_bytes} were written")


def check_file(folder: Path, file: FileSpec, block_bytes: int) -> str | None:
    """Read a whole file; what is wrong with it, or None."""
    try:
        for _ in read_checked(folder, file, block_bytes):
            pass
    except CheckpointError as error:
        return str(error)
    return None
