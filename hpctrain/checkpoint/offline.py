"""Checkpoints in one process without MPI, as on a login node: read, write, export, import."""

from __future__ import annotations

import json
import pickle
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain import log
from hpctrain.atomic import replacing
from hpctrain.checkpoint.agreeing import refuse_gaps
from hpctrain.checkpoint.directory import describe_owner, next_number, quick_check
from hpctrain.checkpoint.format import OWNER, partial_name, read_checked
from hpctrain.checkpoint.layout import assign, divide
from hpctrain.checkpoint.parts import (
    Staging,
    describe,
    items_of,
    lay_out,
    render_tree,
)
from hpctrain.checkpoint.reading import Assembly, read_tree
from hpctrain.checkpoint.saving import Prepared, draft_manifest, prepare
from hpctrain.checkpoint.stores import find_checkpoint, store_of
from hpctrain.checkpoint.writing import Records, finish, write_own_part
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.tensor_names import are_plain, plain_keys

__all__ = [
    "export",
    "import_torch",
    "load_weights",
    "read_checkpoint",
    "read_state",
    "write_checkpoint",
]


def read_state(path: Path) -> Any:
    """Read the state of one of this package's own checkpoints, checked, on the CPU.

    Raises:
        CheckpointError: it is none, or it is damaged.
    """
    manifest, trouble = quick_check(path)
    if manifest is None or trouble is not None:
        raise CheckpointError(str(trouble))
    tree = read_tree(path, manifest)
    assembly = Assembly(manifest, tree, own_rank=None)
    for part, file in enumerate(manifest.parts):
        start = 0
        for block in read_checked(path, file, manifest.block_bytes):
            assembly.take(part, start, np.frombuffer(block, np.uint8))
            start += len(block)
    return assembly.state()


def read_checkpoint(path: Path) -> Any:
    """Read the state of a checkpoint, checked, on the CPU; pieces are put together.

    Raises:
        CheckpointError: it is none, or it is damaged.
    """
    store = store_of(path)
    return read_state(path) if store is None else store.read(path)


def load_weights(
    path: str | Path, *, best: bool | str = False, ema: bool = False, key: str = "model"
) -> dict[str, Any]:
    """The weights of a run, for `model.load_state_dict`, checked, on the CPU. No MPI.

    Args:
        path: A run directory, a directory of checkpoints, or one checkpoint.
        best: As in `find_checkpoint`: the best instead of the newest.
        ema: The averaged weights (`[ema]` in a file), with the model's other buffers.
        key: Where the model is in the state: `NAME.model` where several are trained.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: it has no such model, or no average.
    """
    found = find_checkpoint(path, best=best)
    return weights_in(read_checkpoint(found), found, ema=ema, key=key)


def average_name(key: str) -> str:
    """Where the state has the average of the weights that are under a key. Pure."""
    prefix = key.rpartition(".")[0]
    return f"ema-{prefix}" if prefix else "ema"


def weights_in(state: Any, path: Path, *, ema: bool, key: str) -> dict[str, Any]:
    """The weights, or their averages, in the state of a checkpoint. Pure."""
    known = [name for name in state if name.rpartition(".")[2] == "model"]
    if key not in state:
        raise ConfigError(f"{path} has no {key!r} in its state; models are {', '.join(known)}")
    weights = dict(state[key])
    if ema:
        name = average_name(key)
        if name not in state:
            raise ConfigError(
                f"{path} has no average of the weights of {key!r}; write [ema] decay in the "
                "training's file, or leave --ema and ema=True out"
            )
        weights |= state[name]["averages"]
    return weights


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
        return _write(folder, number, prepared)
    except CheckpointError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(folder: Path, number: int, prepared: Prepared) -> Path:
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
    records.add(write_own_part(folder, 0, 1, data, data_start=len(image.header), own={}))
    draft = draft_manifest(prepared, number, num_ranks=1)
    tree = render_tree(describe(prepared.flat), [segments])
    return finish(draft, folder, (0,), tree, records, deadline=time.monotonic())


_FORMS = (".safetensors", ".pt", ".pth")


def export(path: Path, to: Path, *, key: str | None = "model", ema: bool = False) -> int:
    """Write the state of a checkpoint as one file; the ending of its name says which kind.

    Args:
        path: The checkpoint.
        to: A `.safetensors` file, which holds tensors and nothing else, or a `.pt` file, which
            `torch.load(weights_only=True)` reads: arrays of numpy become tensors there.
        key: What of the state, with slashes to go deeper; None: everything.
        ema: The averaged weights of the model that `key` names, instead of the last ones.

    Returns:
        How many tensors are in it.

    Raises:
        ConfigError: there is no such key, or no such kind of file.
        CheckpointError: the checkpoint is damaged, or the file cannot be written.
    """
    if to.suffix not in _FORMS:
        raise ConfigError(f"{to} must end in {', '.join(_FORMS)}: the suffix selects the format")
    state = read_checkpoint(path)
    if not ema and key is not None and average_name(key) in state:
        log.notice(f"{path.name} has averaged weights, too: --ema (ema=True in Python) writes them")
    if ema:
        state, key = weights_in(state, path, ema=True, key=key or "model"), None
    for word in key.split("/") if key else ():
        if not isinstance(state, dict) or word not in state:
            there = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__
            raise ConfigError(f"{path} has no {key!r} in its state; at {word!r} there is {there}")
        state = state[word]
    state = _with_plain_names(state)
    tensors: dict[str, Tensor] = {}
    others: list[str] = []
    _collect(state, "", tensors, others)
    try:
        with replacing(to) as draft:
            if to.suffix == ".safetensors":
                _write_safetensors(draft, tensors, others)
            else:
                torch.save(_without_numpy(state), draft)
    except OSError as error:
        raise CheckpointError(f"{to} cannot be written ({error.strerror or error})") from error
    return len(tensors)


def import_torch(path: Path) -> Any:
    """Read a `.pt` file: only tensors and plain values, no code is run.

    Raises:
        CheckpointError: it cannot be read, or holds more than that.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be imported: {str(error).splitlines()[0]}; only files of tensors and "
            "plain values are read, because reading anything else could run code. On the source "
            "machine, save the model's state_dict() with torch.save"
        ) from error


def _collect(value: Any, name: str, tensors: dict[str, Tensor], others: list[str]) -> None:
    """All tensors of a tree by name, and the names of what is none."""
    if isinstance(value, Tensor):
        tensors[name or "value"] = value
        return
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _collect(item, f"{name}/{key}" if name else str(key), tensors, others)
        return
    others.append(name)


def _with_plain_names(value: Any) -> Any:
    """The tree without the wrappers of `torch.compile` in its names, which older states have."""
    if not isinstance(value, dict):
        return value
    for key, item in value.items():
        value[key] = _with_plain_names(item)
    return value if are_plain(value) else plain_keys(value)


def _without_numpy(value: Any) -> Any:
    """The tree with tensors, numbers and text instead of what only numpy can read."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, dict):
        made = type(value)((_without_numpy(k), _without_numpy(v)) for k, v in value.items())
        if isinstance(value, OrderedDict):
            vars(made).update(vars(value))  # the versions of modules
        return made
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(_without_numpy(item) for item in value)
    return value


def _write_safetensors(path: Path, tensors: dict[str, Tensor], others: list[str]) -> None:
    from safetensors.torch import save_file

    if others:
        log.warn(
            f"a .safetensors file holds tensors only; left out: {', '.join(others[:5])}"
            + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        )
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        # The package refuses tensors that share memory; one more copy says the same.
        separate[name] = tensor.detach().clone() if tensor.data_ptr() in seen else tensor.detach()
        seen.add(tensor.data_ptr())
    save_file({n: t.contiguous() for n, t in separate.items()}, path, metadata={"format": "pt"})
