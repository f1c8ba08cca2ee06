"""How checkpoints and what belongs to them are called. Pure.

The newest checkpoint is the one with the highest number, not the one with the highest step: a run
that went back to an earlier step goes on from there, and clocks of several nodes do not matter.
"""

from __future__ import annotations

import re
from pathlib import PurePath

__all__ = [
    "MANIFEST",
    "TREE",
    "checkpoint_name",
    "failure_name",
    "is_leftover",
    "number_of",
    "part_name",
    "partial_name",
    "record_name",
    "step_of",
    "trash_name",
]

MANIFEST = "manifest.json"
TREE = "tree.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})-step-(\d+)")
_LEFTOVER = re.compile(r"\.(?:partial|trash)-checkpoint-(\d{6,})-step-(\d+)\.[0-9a-f]+")


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
    """The step of a complete checkpoint, from its name; None: it is no checkpoint."""
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
