"""A state tree put together again from JSON and tensors. Pure; executes nothing it reads."""

from __future__ import annotations

import base64
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from hpctrain.checkpoint.dtypes import named_dtype
from hpctrain.errors import CheckpointError
from hpctrain.pieces import Piece, Region, regions_of_run

__all__ = ["Ask", "Wanted", "unflatten"]

_Json = Any


@dataclass(frozen=True, slots=True)
class Ask:
    """A piece of a stored tensor that this rank wants."""

    name: str
    offset: tuple[int, ...] | int
    """As in a `Piece`."""
    shape: tuple[int, ...]
    """Of the piece."""
    whole: tuple[int, ...]
    """Shape of the stored tensor."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """The blocks that it consists of, in the order of its elements."""
        if isinstance(self.offset, int):
            stop = self.offset + self.shape[0]
            return tuple(regions_of_run(self.whole, self.offset, stop))
        return (Region(self.offset, self.shape),)


Wanted = str | Ask
"""A whole tensor by its name, or a piece of one."""


def unflatten(skeleton: _Json, tensors: Mapping[Wanted, Tensor]) -> Any:
    """Put a tree together; what was one tensor in several places is one again.

    Raises:
        CheckpointError: the skeleton is not one that `flatten` makes, or a tensor is missing.
    """
    try:
        return _Walk(tensors).decode(skeleton)
    except (KeyError, ValueError, TypeError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"the tree of this checkpoint cannot be read ({error!r})") from error


class _Walk:
    def __init__(self, tensors: Mapping[Wanted, Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[tuple[Wanted, bool, bool], Tensor] = {}
        self._pieces: dict[int, Piece] = {}

    def decode(self, value: _Json) -> Any:
        if type(value) is list:
            return [self.decode(item) for item in value]
        if type(value) is not dict:
            return value
        if "$" not in value:
            return {key: self.decode(item) for key, item in value.items()}
        return _KINDS[value["$"]](self, value)

    def pairs(self, value: _Json) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(item)) for key, item in value["items"]]

    def tensor(self, value: _Json) -> Tensor | Piece:
        wanted: Wanted = value["name"]
        made = self._made_of(wanted, value)
        if isinstance(wanted, str):
            return made
        if id(made) not in self._pieces:
            self._pieces[id(made)] = Piece(made, wanted.offset, wanted.whole)
        return self._pieces[id(made)]

    def _made_of(self, wanted: Wanted, value: _Json) -> Tensor:
        wants_grad = bool(value.get("requires_grad", False))
        key = (wanted, bool(value.get("parameter", False)), wants_grad)
        if key not in self._made:
            data = self._tensors[wanted]
            if key[1]:
                self._made[key] = Parameter(data, requires_grad=wants_grad)
            else:
                self._made[key] = data.detach().requires_grad_(True) if wants_grad else data
        return self._made[key]

    def array(self, value: _Json) -> Any:
        data = self._tensors[value["name"]]
        flat = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else np.empty(0, "u1")
        dtype = np.dtype(value["dtype"])
        if 0 in value["shape"] or dtype.itemsize == 0:
            return np.empty(value["shape"], dtype)
        return flat.view(dtype).reshape(value["shape"])


def _ordered(walk: _Walk, value: _Json) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = OrderedDict(walk.pairs(value))
    if "metadata" in value:
        made._metadata = walk.decode(value["metadata"])  # type: ignore[attr-defined]
    return made


def _complex(walk: _Walk, value: _Json) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(value["hex"])))


def _numpy(walk: _Walk, value: _Json) -> Any:
    dtype = np.dtype(value["dtype"])
    raw = bytes.fromhex(value["hex"])
    return np.frombuffer(raw, dtype)[0] if dtype.itemsize else np.zeros(1, dtype)[0]


_KINDS: dict[str, Callable[[_Walk, _Json], Any]] = {
    "tensor": _Walk.tensor,
    "ndarray": _Walk.array,
    "tuple": lambda walk, value: tuple(walk.decode(item) for item in value["items"]),
    "torch.Size": lambda walk, value: torch.Size(value["items"]),
    "dict": lambda walk, value: dict(walk.pairs(value)),
    "OrderedDict": _ordered,
    "int": lambda walk, value: int(value["hex"], 16),
    "float": lambda walk, value: struct.unpack(">d", bytes.fromhex(value["hex"]))[0],
    "complex": _complex,
    "bytes": lambda walk, value: base64.b64decode(value["base64"], validate=True),
    "numpy": _numpy,
    "torch.dtype": lambda walk, value: named_dtype(value["name"]),
    "torch.device": lambda walk, value: torch.device(value["name"]),
}
