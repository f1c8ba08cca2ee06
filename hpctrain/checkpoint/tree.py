"""A state tree as JSON and named tensors, without loss, or refused with the place; and back. Pure.

JSON's own values stand for themselves. Whatever JSON cannot tell apart is an object with the key
`$`: tuples, dictionaries with other keys than text, bytes, complex and non-finite numbers, numpy
values, torch's dtypes and devices, and tensors, which are named and stored elsewhere. Everything
is matched by its exact type: a subclass would be restored as something else. Reading runs no code.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from hpctrain.checkpoint.layout import Source
from hpctrain.errors import CheckpointError
from hpctrain.pieces import Piece, Region, regions_of_run

__all__ = [
    "MOST_DEPTH",
    "Flat",
    "PieceRequest",
    "Wanted",
    "dtype_name",
    "flatten",
    "named_dtype",
    "safetensors_name",
    "unflatten",
]

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def safetensors_name(dtype: torch.dtype) -> str | None:
    """What the format calls a dtype; None: it has no name for it."""
    return _NAMES.get(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's own name, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        CheckpointError: this torch has none such.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


MOST_DEPTH = 100
_EXACT_INT = 1 << 53
_Json = Any


@dataclass(slots=True)
class Flat:
    """A tree taken apart."""

    skeleton: _Json = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name; a tensor that occurs in several places is listed once."""
    pieces: dict[str, Piece] = field(default_factory=dict)
    """By name: tensors of which this rank holds a part."""
    leaves: dict[str, str] = field(default_factory=dict)
    """A description of each place: ranks compare it."""

    @property
    def kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of every tensor, whole or in pieces, by name."""
        whole = {name: (t.dtype, tuple(t.shape)) for name, t in self.tensors.items()}
        return whole | {n: (p.tensor.dtype, tuple(p.shape)) for n, p in self.pieces.items()}

    def held(self) -> dict[tuple[str, Region], Tensor]:
        """What this rank holds of the tensors that are in pieces."""
        return {
            (name, region): tensor
            for name, piece in self.pieces.items()
            for region, tensor in piece.held()
        }

    @property
    def sources(self) -> dict[Source, Tensor]:
        """Everything that this rank can write: whole tensors, and blocks that it holds."""
        whole: dict[Source, Tensor] = dict(self.tensors.items())
        return whole | dict(self.held().items())

    def fingerprint(self) -> int:
        """A number that is the same for trees with the same leaves, whatever their order."""
        return sum(zlib.crc32(f"{place}={what}".encode()) for place, what in self.leaves.items())


def flatten(tree: object) -> Flat:
    """Take a tree apart.

    Raises:
        CheckpointError: something in it cannot be stored without loss; the place is named.
    """
    walk = _Encoder()
    walk.flat.skeleton = walk.encode(tree, (), "state", 0)
    return walk.flat


class _Encoder:
    """One walk over a tree."""

    def __init__(self) -> None:
        self.flat = Flat()
        self._tied: dict[object, str] = {}
        self._above: set[int] = set()

    def encode(self, value: Any, path: tuple[str, ...], place: str, depth: int) -> _Json:
        kind = type(value)
        if kind in _CONTAINERS:
            return self._inside(value, path, place, depth)
        if kind is Tensor or kind is Parameter:
            return self._tensor(value, path, place)
        if kind is Piece:
            return self._piece(value, path, place)
        if kind is np.ndarray:
            return self._array(value, path, place)
        encoder = _PLAIN.get(kind) or (_numpy_scalar if isinstance(value, np.generic) else None)
        if encoder is None:
            raise CheckpointError(f"{place} is {_article(kind)}, which cannot be stored; {_hint()}")
        encoded = encoder(value, place)
        self.flat.leaves[place] = repr(encoded)
        return encoded

    def _inside(self, value: Any, path: tuple[str, ...], place: str, depth: int) -> _Json:
        """What is in a container, each item under its key."""
        if id(value) in self._above:
            raise CheckpointError(f"{place} contains itself; a tree has no cycles")
        if depth >= MOST_DEPTH:
            raise CheckpointError(
                f"{place} is {depth} levels deep; at most {MOST_DEPTH} are allowed"
            )
        self._above.add(id(value))
        encoded = _CONTAINERS[type(value)](self, value, path, place, depth + 1)
        self._above.discard(id(value))
        if not value:
            self.flat.leaves[place] = repr(encoded)
        return encoded

    def items(self, value: Any, path: tuple[str, ...], place: str, depth: int) -> list[_Json]:
        return [
            self.encode(item, (*path, str(index)), f"{place}[{index}]", depth)
            for index, item in enumerate(value)
        ]

    def pairs(
        self, value: Mapping[Any, Any], path: tuple[str, ...], place: str, depth: int
    ) -> list[tuple[_Json, _Json]]:
        return [
            (
                _encode_key(key, place),
                self.encode(item, (*path, str(key)), f"{place}[{key!r}]", depth),
            )
            for key, item in value.items()
        ]

    def _tensor(self, value: Tensor, path: tuple[str, ...], place: str) -> _Json:
        trouble = _why_not(value)
        if trouble:
            raise CheckpointError(f"{place} is {trouble}; {_hint()}")
        encoded = _tensor_node(self._name(value, path), value)
        self.flat.leaves[place] = f"{encoded} {dtype_name(value.dtype)} {tuple(value.shape)}"
        return encoded

    def _piece(self, value: Piece, path: tuple[str, ...], place: str) -> _Json:
        """A tensor that is sharded over ranks: all but what of it is here must match."""
        trouble = _why_not(value.tensor) or value.mistake()
        if trouble:
            raise CheckpointError(f"{place} is {trouble}")
        # By identity, not by memory: an empty piece has none, and names must match on all ranks.
        if id(value) not in self._tied:
            name = self._tied[id(value)] = self._free_name(path)
            self.flat.pieces[name] = Piece(value.tensor.detach(), value.offset, value.shape)
        encoded = _tensor_node(self._tied[id(value)], value.tensor)
        kind = dtype_name(value.tensor.dtype)
        self.flat.leaves[place] = f"{encoded} {kind} {tuple(value.shape)} in pieces"
        return encoded

    def _array(self, value: np.ndarray, path: tuple[str, ...], place: str) -> _Json:
        if value.dtype.hasobject or value.dtype.fields is not None:
            raise CheckpointError(
                f"{place} is a numpy array of {value.dtype}; arrays of numbers, text, dates or "
                "bytes are kept, objects and records are not: store each field of a record "
                "separately"
            )
        shape, dtype = list(value.shape), value.dtype.str
        tensor = _array_tensor(value)
        name = self._new_name(path, tensor)
        self.flat.leaves[place] = f"numpy {dtype} {shape}"
        return {"$": "ndarray", "name": name, "dtype": dtype, "shape": shape}

    def _name(self, value: Tensor, path: tuple[str, ...]) -> str:
        """A new name, or the one under which the same memory has been met already."""
        if value.numel() == 0:
            return self._new_name(path, value)
        same = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if same not in self._tied:
            self._tied[same] = self._new_name(path, value)
        return self._tied[same]

    def _new_name(self, path: tuple[str, ...], value: Tensor) -> str:
        name = self._free_name(path)
        self.flat.tensors[name] = value.detach()
        return name

    def _free_name(self, path: tuple[str, ...]) -> str:
        name = wanted = "/".join(path) or "value"
        count = 1
        # {0: a, "0": b}, or a slash inside a key
        while name in self.flat.tensors or name in self.flat.pieces:
            count += 1
            name = f"{wanted}~{count}"
        return name


def _tensor_node(name: str, value: Tensor) -> dict[str, _Json]:
    encoded: dict[str, _Json] = {"$": "tensor", "name": name}
    if type(value) is Parameter:
        encoded["parameter"] = True
    if value.requires_grad:
        encoded["requires_grad"] = True
    return encoded


def _why_not(value: Tensor) -> str | None:
    """Why a tensor cannot be stored, or None."""
    if value.layout is not torch.strided or value.is_nested:
        return f"a tensor of layout {value.layout}"
    if value.is_quantized:
        return f"a quantized tensor ({value.dtype})"
    if value.device.type == "meta":
        return "a tensor without data (device meta)"
    return None


def _array_tensor(value: np.ndarray) -> Tensor:
    """The numbers of an array as a tensor: of its dtype where torch has it, else as bytes."""
    flat = np.ascontiguousarray(value).reshape(-1)
    if flat.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if not flat.flags.writeable:
        flat = flat.copy()  # torch warns of memory that must not be written to
    data = torch.from_numpy(flat.view(np.uint8))
    dtype = getattr(torch, value.dtype.name, None)
    if isinstance(dtype, torch.dtype) and value.dtype.isnative:
        return data.view(dtype).reshape(value.shape)
    return data


def _encode_key(key: Any, place: str) -> _Json:
    if type(key) is tuple:
        return {"$": "tuple", "items": [_encode_key(item, place) for item in key]}
    encoder = _PLAIN.get(type(key)) or (_numpy_scalar if isinstance(key, np.generic) else None)
    if encoder is None:
        raise CheckpointError(
            f"{place} has the key {key!r}, {_article(type(key))}, which cannot be stored; use "
            "text, numbers or tuples of them"
        )
    return encoder(key, place)


def _as_list(walk: _Encoder, value: Any, path: tuple[str, ...], place: str, depth: int) -> _Json:
    return walk.items(value, path, place, depth)


def _as_tuple(walk: _Encoder, value: Any, path: tuple[str, ...], place: str, depth: int) -> _Json:
    kind = "torch.Size" if type(value) is torch.Size else "tuple"
    return {"$": kind, "items": walk.items(value, path, place, depth)}


def _as_dict(walk: _Encoder, value: Any, path: tuple[str, ...], place: str, depth: int) -> _Json:
    pairs = walk.pairs(value, path, place, depth)
    if all(type(key) is str for key in value) and "$" not in value:
        return dict(pairs)
    return {"$": "dict", "items": [list(pair) for pair in pairs]}


def _as_ordered(walk: _Encoder, value: Any, path: tuple[str, ...], place: str, depth: int) -> _Json:
    pairs = walk.pairs(value, path, place, depth)
    encoded: dict[str, _Json] = {"$": "OrderedDict", "items": [list(pair) for pair in pairs]}
    extra = dict(vars(value))
    if "_metadata" in extra:  # the versions of modules, in the state of a model
        inside = extra.pop("_metadata")
        encoded["metadata"] = walk.encode(inside, path, f"{place}._metadata", depth)
    if extra:
        raise CheckpointError(
            f"{place} is an OrderedDict with extra attributes ({', '.join(extra)}), which "
            "cannot be stored; put them into the tree"
        )
    return encoded


_CONTAINERS: dict[type, Callable[..., _Json]] = {
    list: _as_list,
    tuple: _as_tuple,
    torch.Size: _as_tuple,
    dict: _as_dict,
    OrderedDict: _as_ordered,
}


def _itself(value: Any, place: str) -> _Json:
    return value


def _int(value: int, place: str) -> _Json:
    # Beyond this other languages' JSON readers round.
    return value if abs(value) < _EXACT_INT else {"$": "int", "hex": hex(value)}


def _float(value: float, place: str) -> _Json:
    if value - value == 0:
        return value
    return {"$": "float", "hex": struct.pack(">d", value).hex()}  # which nan it is, too


def _complex(value: complex, place: str) -> _Json:
    return {"$": "complex", "hex": struct.pack(">dd", value.real, value.imag).hex()}


def _bytes(value: bytes, place: str) -> _Json:
    return {"$": "bytes", "base64": base64.b64encode(value).decode()}


def _dtype(value: torch.dtype, place: str) -> _Json:
    return {"$": "torch.dtype", "name": dtype_name(value)}


def _device(value: torch.device, place: str) -> _Json:
    return {"$": "torch.device", "name": str(value)}


def _numpy_scalar(value: np.generic, place: str) -> _Json:
    if value.dtype.hasobject or value.dtype.fields is not None:
        raise CheckpointError(f"{place} is a numpy record or object, which cannot be stored")
    return {"$": "numpy", "dtype": value.dtype.str, "hex": value.tobytes().hex()}


_PLAIN: dict[type, Callable[[Any, str], _Json]] = {
    type(None): _itself,
    bool: _itself,
    str: _itself,
    int: _int,
    float: _float,
    complex: _complex,
    bytes: _bytes,
    torch.dtype: _dtype,
    torch.device: _device,
}


def _article(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"of type {module}{kind.__qualname__}"


def _hint() -> str:
    return (
        "a state consists of dictionaries, lists, tuples, tensors, numpy arrays, numbers, text, "
        "bytes, None and pieces of tensors; convert it, or leave it out"
    )


@dataclass(frozen=True, slots=True)
class PieceRequest:
    """A piece of a stored tensor that this rank needs."""

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


Wanted = str | PieceRequest
"""A whole tensor by its name, or a piece of one."""


def unflatten(skeleton: _Json, tensors: Mapping[Wanted, Tensor]) -> Any:
    """Put a tree together; what was one tensor in several places is one again.

    Raises:
        CheckpointError: the skeleton is not one that `flatten` makes, or a tensor is missing.
    """
    try:
        return _Decoder(tensors).decode(skeleton)
    except (KeyError, ValueError, TypeError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"the tree of this checkpoint cannot be read ({error!r})") from error


class _Decoder:
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


def _ordered(walk: _Decoder, value: _Json) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = OrderedDict(walk.pairs(value))
    if "metadata" in value:
        made._metadata = walk.decode(value["metadata"])  # type: ignore[attr-defined]
    return made


def _read_complex(walk: _Decoder, value: _Json) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(value["hex"])))


def _read_numpy(walk: _Decoder, value: _Json) -> Any:
    dtype = np.dtype(value["dtype"])
    raw = bytes.fromhex(value["hex"])
    return np.frombuffer(raw, dtype)[0] if dtype.itemsize else np.zeros(1, dtype)[0]


_KINDS: dict[str, Callable[[_Decoder, _Json], Any]] = {
    "tensor": _Decoder.tensor,
    "ndarray": _Decoder.array,
    "tuple": lambda walk, value: tuple(walk.decode(item) for item in value["items"]),
    "torch.Size": lambda walk, value: torch.Size(value["items"]),
    "dict": lambda walk, value: dict(walk.pairs(value)),
    "OrderedDict": _ordered,
    "int": lambda walk, value: int(value["hex"], 16),
    "float": lambda walk, value: struct.unpack(">d", bytes.fromhex(value["hex"]))[0],
    "complex": _read_complex,
    "bytes": lambda walk, value: base64.b64decode(value["base64"], validate=True),
    "numpy": _read_numpy,
    "torch.dtype": lambda walk, value: named_dtype(value["name"]),
    "torch.device": lambda walk, value: torch.device(value["name"]),
}
