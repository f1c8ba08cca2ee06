"""Checkpoints read and written by one process without MPI: on a login node, in a notebook."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.assembling import Assembly
from hpctrain.checkpoint.catalog import next_number, quick_check
from hpctrain.checkpoint.checksums import read_checked
from hpctrain.checkpoint.finishing import OWNER, Outline, Records, finish, write_own_part
from hpctrain.checkpoint.holding import refuse_gaps
from hpctrain.checkpoint.layout import assign, divide
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.naming import TREE, partial_name
from hpctrain.checkpoint.part import Staging, lay_out
from hpctrain.checkpoint.preparing import Prepared, prepare, versions
from hpctrain.checkpoint.removing import describe_owner
from hpctrain.checkpoint.tree_file import Tree, describe, items_of, parse_tree, render_tree
from hpctrain.errors import CheckpointError

__all__ = ["open_checkpoint", "read_checkpoint", "read_tree", "write_checkpoint"]


def read_tree(folder: Path, manifest: Manifest) -> Tree:
    """Read and check `tree.json`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    text = b"".join(
        bytes(block) for block in read_checked(folder, manifest.tree, manifest.block_bytes)
    )
    return parse_tree(text, folder / TREE)


def open_checkpoint(path: Path) -> tuple[Manifest, Tree]:
    """What a checkpoint says of itself, without its tensors.

    Raises:
        CheckpointError: it is none, or it is damaged.
    """
    manifest, trouble = quick_check(path)
    if manifest is None or trouble is not None:
        raise CheckpointError(str(trouble))
    return manifest, read_tree(path, manifest)


def read_checkpoint(path: Path) -> Any:
    """Read the state of a checkpoint, checked, on the CPU.

    Raises:
        CheckpointError: it is none, or it is damaged.
    """
    manifest, tree = open_checkpoint(path)
    assembly = Assembly(manifest, tree, own_rank=None)
    for part, file in enumerate(manifest.parts):
        start = 0
        for block in read_checked(path, file, manifest.block_bytes):
            assembly.take(part, start, np.frombuffer(block, np.uint8))
            start += len(block)
    return assembly.state()


def write_checkpoint(
    directory: Path,
    state: object,
    *,
    step: int,
    note: object = None,
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Write a checkpoint and return its path once it is complete.

    Raises:
        CheckpointError: the state cannot be stored, or the disk does not take it.
    """
    prepared = prepare(state, step=step, own=None, note=note, metrics=metrics)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        number = next_number(directory)
        folder = directory / partial_name(number, step, secrets.token_hex(8))
        folder.mkdir()
        (folder / OWNER).write_text(json.dumps(describe_owner(None)))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written to ({error.strerror})") from error
    try:
        return _write(directory, folder, number, prepared)
    except CheckpointError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(directory: Path, folder: Path, number: int, prepared: Prepared) -> Path:
    tensors = prepared.flat.tensors
    held = prepared.flat.held()
    holders = {key: (0,) for key in held}
    refuse_gaps(prepared.flat, holders)
    widths = {name: piece.tensor.element_size() for name, piece in prepared.flat.pieces.items()}
    assigned, _ = assign(holders, widths, (0,), (0,))
    (segments,) = divide(items_of(tensors), 1, assigned)
    image = lay_out(segments, prepared.flat, {})
    data = Staging().fill(image, segments, prepared.flat.sources, {})
    records = Records()
    records.tell(write_own_part(folder, 0, 1, data, data_start=len(image.header), own={}))
    outline = Outline(
        directory=directory,
        folder=folder,
        number=number,
        step=prepared.step,
        writers=(0,),
        num_ranks=1,
        has_own=False,
        versions=versions(),
        metrics=prepared.metrics,
        note=prepared.note,
        version=2 if held else 1,
    )
    tree = render_tree(describe(prepared.flat), [segments])
    return finish(outline, tree, records, deadline=time.monotonic())
