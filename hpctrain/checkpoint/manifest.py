"""What is in a checkpoint: one JSON file with the checksums of all others, and its own. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.naming import MANIFEST, TREE
from hpctrain.errors import CheckpointError

__all__ = [
    "BLOCK_BYTES",
    "FileSpec",
    "Manifest",
    "parse_manifest",
    "read_manifest",
    "render_manifest",
]

BLOCK_BYTES = 16 << 20
"""Each so many bytes of a file have a checksum of their own: several ranks can read and check one
file, and a message can say where it is broken."""
_FORMAT = "hpctrain-checkpoint"
_VERSIONS = (1, 2)
"""2 has tensors in pieces; where there are none, 1 is written, which older releases read."""
_TAIL = ',\n "crc32": "'


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
    """For each rank the part, start and length of what it alone knew; None: nothing was given."""
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
        CheckpointError: it is no manifest, is damaged, or belongs to another version.
    """
    body, found, tail = text.rpartition(_TAIL)
    if not found or tail != f'{zlib.crc32(body.encode()):08x}"\n}}\n':
        raise CheckpointError(f"{path} is damaged: its checksum does not match what it says")
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
        raise CheckpointError(f"{path} is no manifest of a checkpoint ({error!r})") from error


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
            f"{path} is missing: {folder} is no checkpoint, or has lost its manifest"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    manifest = parse_manifest(text, path)
    if manifest.tree.name != TREE:
        raise CheckpointError(f"{path} calls its tree {manifest.tree.name!r} and not {TREE!r}")
    return manifest
