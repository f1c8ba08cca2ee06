"""A checkpoint's files: their names, the manifest, and checksums. No torch, no MPI.

The newest checkpoint is the one with the highest number, not the one with the highest step: a run
that went back to an earlier step resumes from there, and clocks of several nodes do not matter.

The manifest is one JSON file with the checksums of all others, and its own. Checksums are CRC-32 by
zlib, block by block: it finds every flipped bit and every burst of up to 32 bits, every language
has it, and it is the fastest in Python's standard library (docs/checkpoints.md). It is no
protection against a forged checkpoint; nothing in one is ever executed.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from hpctrain.errors import CheckpointError

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST",
    "TREE",
    "FileSpec",
    "Manifest",
    "check_block",
    "check_file",
    "checkpoint_name",
    "failure_name",
    "is_leftover",
    "num_blocks",
    "number_of",
    "parse_manifest",
    "part_name",
    "partial_name",
    "read_block",
    "read_checked",
    "read_manifest",
    "record_name",
    "render_manifest",
    "step_of",
    "trash_name",
]

MANIFEST = "manifest.json"
TREE = "tree.json"
OWNER = "owner.json"
"""Who writes a checkpoint; not part of the data."""
_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})-step-(\d+)")
_LEFTOVER = re.compile(r"\.(?:partial|trash)-checkpoint-(\d{6,})-step-(\d+)\.[0-9a-f]+")
BLOCK_BYTES = 16 << 20
"""Each block of this many bytes has its own checksum: several ranks can read and check one
file, and a message can locate the damage."""
_FORMAT = "hpctrain-checkpoint"
_VERSIONS = (1, 2)
"""Version 2 has tensors in pieces; without pieces 1 is written, which older releases read."""
_TAIL = ',\n "crc32": "'


def checkpoint_name(number: int, step: int) -> str:
    """Of a complete checkpoint's directory."""
    return f"checkpoint-{number:06d}-step-{step}"


def partial_name(number: int, step: int, token: str) -> str:
    """Of the directory until everything in it is on disk."""
    return f".partial-{checkpoint_name(number, step)}.{token}"


def trash_name(name: str, token: str) -> str:
    """Of a directory that is about to be removed: gone in one move, whatever interrupts it."""
    return f".trash-{name}.{token}"


def is_leftover(path: PurePath | str) -> bool:
    """Whether this is a directory of a save, or a removal, that has not come to its end."""
    return _LEFTOVER.fullmatch(PurePath(path).name) is not None


def number_of(path: PurePath | str) -> int | None:
    """The number of a complete checkpoint or of a leftover; None: it is neither."""
    name = PurePath(path).name
    match = _CHECKPOINT.fullmatch(name) or _LEFTOVER.fullmatch(name)
    return int(match[1]) if match else None


def step_of(path: PurePath | str) -> int | None:
    """The step of a complete checkpoint, from its name; None: it is not a checkpoint."""
    match = _CHECKPOINT.fullmatch(PurePath(path).name)
    return int(match[2]) if match else None


def part_name(part: int, num_parts: int) -> str:
    """Of the file that one writer writes."""
    return f"part-{part:05d}-of-{num_parts:05d}.safetensors"


def record_name(part: int) -> str:
    """Of what a writer says about its part when it is on disk."""
    return f"part-{part:05d}.json"


def failure_name(part: int) -> str:
    """Of what a writer says when it could not write its part."""
    return f"part-{part:05d}.failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSpec:
    """A file of a checkpoint."""

    name: str
    num_bytes: int
    blocks: tuple[str, ...]
    """CRC-32 of each block, eight hexadecimal digits."""
    data_start: int = 0
    """Where the tensors begin, behind the file's own header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole checkpoint, without its tensors."""

    number: int
    step: int
    saved_at: float
    """Seconds since 1970, by the clock of rank 0."""
    num_ranks: int
    versions: Mapping[str, str]
    """Of hpctrain and torch, for people."""
    tree: FileSpec
    parts: tuple[FileSpec, ...]
    own: tuple[tuple[int, int, int], ...] | None
    """For each rank the part, start and length of its own state; None: nothing was given."""
    metrics: Mapping[str, float]
    note: Any
    block_bytes: int = BLOCK_BYTES
    version: int = 1
    """Of the format."""

    @property
    def files(self) -> tuple[FileSpec, ...]:
        """All files but the manifest itself."""
        return (self.tree, *self.parts)

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest itself."""
        return sum(file.num_bytes for file in self.files)


def render_manifest(manifest: Manifest) -> str:
    """As text: one line for each item, the last one with the checksum of all before it."""
    items = {"format": _FORMAT, "version": manifest.version, **asdict(manifest)}
    # JSON has no nan and no infinite numbers.
    items["metrics"] = {n: v if v - v == 0 else str(v) for n, v in manifest.metrics.items()}
    lines = [f" {json.dumps(key)}: {json.dumps(item)}" for key, item in items.items()]
    body = "{\n" + ",\n".join(lines)
    return f'{body}{_TAIL}{zlib.crc32(body.encode()):08x}"\n}}\n'


def parse_manifest(text: str, path: object) -> Manifest:
    """Read a manifest's text; `path` is for messages.

    Raises:
        CheckpointError: it is not a manifest, is damaged, or belongs to another version.
    """
    body, found, tail = text.rpartition(_TAIL)
    if not found or tail != f'{zlib.crc32(body.encode()):08x}"\n}}\n':
        raise CheckpointError(f"{path} is damaged: its checksum does not match its contents")
    try:
        told = json.loads(body + "\n}")
        if told["format"] != _FORMAT or told["version"] not in _VERSIONS:
            raise CheckpointError(
                f"{path} says {told['format']!r} version {told['version']!r}; this hpctrain reads "
                f"{_FORMAT!r} version {' and '.join(map(str, _VERSIONS))}"
            )
        own = told["own"]
        return Manifest(
            number=int(told["number"]),
            step=int(told["step"]),
            saved_at=float(told["saved_at"]),
            num_ranks=int(told["num_ranks"]),
            versions=told["versions"],
            tree=parse_file(told["tree"]),
            parts=tuple(parse_file(part) for part in told["parts"]),
            own=None if own is None else tuple((int(p), int(s), int(n)) for p, s, n in own),
            metrics={name: float(value) for name, value in told["metrics"].items()},
            note=told["note"],
            block_bytes=int(told["block_bytes"]),
            version=int(told["version"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint manifest ({error!r})") from error


def parse_file(told: Mapping[str, Any]) -> FileSpec:
    """Read what was written of a file."""
    return FileSpec(
        name=str(told["name"]),
        num_bytes=int(told["num_bytes"]),
        blocks=tuple(told["blocks"]),
        data_start=int(told["data_start"]),
    )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode("ascii")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: {folder} is not a checkpoint, or its manifest was lost"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    manifest = parse_manifest(text, path)
    if manifest.tree.name != TREE:
        raise CheckpointError(f"{path} names its tree {manifest.tree.name!r}, not {TREE!r}")
    return manifest


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    """How many blocks a file has; an empty one has none."""
    return -(-num_bytes // block_bytes)


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
            f"{path} is damaged: bytes {start} to {start + wanted} have a different checksum than "
            "when they were written"
        )


def read_checked(folder: Path, file: FileSpec, block_bytes: int) -> Iterator[memoryview]:
    """Read a file block by block, each checked; a block is freed when the next is requested.

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
    """Read a whole file; returns what is wrong with it, or None."""
    try:
        for _ in read_checked(folder, file, block_bytes):
            pass
    except CheckpointError as error:
        return str(error)
    return None
