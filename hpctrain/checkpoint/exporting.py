"""Checkpoints for other tools, and other tools' files as checkpoints. No MPI."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain import log
from hpctrain.checkpoint.finding import average_name, weights_in
from hpctrain.checkpoint.stores import read_checkpoint
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.tensor_names import are_plain, plain_keys

__all__ = ["export", "import_torch"]

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
        raise ConfigError(f"{to} must end in {', '.join(_FORMS)}: the ending says what is written")
    state = read_checkpoint(path)
    if not ema and key is not None and average_name(key) in state:
        log.notice(f"{path.name} has averaged weights, too: --ema, in Python ema=True, writes them")
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
    temporary = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        if to.suffix == ".safetensors":
            _write_safetensors(temporary, tensors, others)
        else:
            torch.save(_without_numpy(state), temporary)
        temporary.replace(to)
    except OSError as error:
        raise CheckpointError(f"{to} cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)
    return len(tensors)


def import_torch(path: Path) -> Any:
    """Read somebody's `.pt` file: tensors and plain values alone, no code is run.

    Raises:
        CheckpointError: it cannot be read, or holds more than that.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be imported: {str(error).splitlines()[0]}; only files of tensors and "
            "plain values are read, because reading anything else could run code. Save the model's "
            "state_dict() with torch.save where the file came from"
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
