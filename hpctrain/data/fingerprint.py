"""Digests of samples: whether ranks read the same data, without sending them. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from hpctrain.data.columns import as_bytes

__all__ = ["DIGEST_BYTES", "digest_sample", "is_read", "show_sample"]

DIGEST_BYTES = 8
"""The length of a digest."""

_SHOWN = 48
_NUM_PIECES = 64
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))


def digest_sample(sample: Any, *, most_bytes: int | None = None) -> bytes:
    """A short digest of what a sample holds.

    Equal samples have equal digests in every process: nothing depends on addresses, on hash seeds
    or on how an array lies in memory. Of unreadable objects, only the type
    counts: their pickles may differ where they are equal.

    Args:
        sample: Tensors, arrays, numbers, text, bytes, images and dataclasses, alone or in tuples,
            lists, sets and dicts.
        most_bytes: Of longer arrays, tensors and bytes only this many count, in 64 pieces that are
            spread over them evenly: for samples that are digested all the time. None: all.
    """
    found = _Digest(most_bytes)
    found.add(sample)
    return found.hash.digest()


def is_read(sample: Any) -> bool:
    """Whether a digest covers some content of a sample, rather than types alone."""
    if isinstance(sample, Mapping):
        return any(map(is_read, sample.values()))
    if isinstance(sample, tuple | list | set | frozenset):
        return any(map(is_read, sample))
    if isinstance(sample, torch.Tensor):
        return _is_plain(sample)
    if is_dataclass(sample) and not isinstance(sample, type):
        return any(is_read(getattr(sample, field.name)) for field in fields(sample))
    return isinstance(sample, (*_PLAIN, np.ndarray, np.generic, memoryview)) or _is_image(sample)


def show_sample(sample: Any) -> str:
    """A sample in a few words, for an error message."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        values = sample.reshape(-1).tolist() if _is_small(sample) else None
        text = f"{type(sample).__name__} {tuple(sample.shape)}"
        return text if values is None else f"{text} {values}"
    if isinstance(sample, Mapping):
        inside = ", ".join(f"{key!r}: {show_sample(part)}" for key, part in sample.items())
        return _cut(f"{{{inside}}}")
    if isinstance(sample, tuple | list):
        return _cut(f"({', '.join(map(show_sample, sample))})")
    return _cut(repr(sample)) if isinstance(sample, _PLAIN) else type(sample).__name__


def _is_small(values: torch.Tensor | np.ndarray[Any, Any]) -> bool:
    if not isinstance(values, torch.Tensor):
        return values.size <= 4
    return _is_plain(values) and values.numel() <= 4


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values can be read as they lie in memory."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _is_image(part: Any) -> bool:
    """Whether this is an image of Pillow, which need not be installed."""
    return hasattr(part, "tobytes") and hasattr(part, "size") and hasattr(part, "mode")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _spread(length: int, most: int | None) -> list[slice]:
    """Which pieces of something that long count: all, or the beginnings of 64 parts and the end."""
    if most is None or length <= most:
        return [slice(length)]
    size = max(1, most // _NUM_PIECES)
    starts = [length * number // _NUM_PIECES for number in range(_NUM_PIECES)]
    return [slice(start, start + size) for start in (*starts, length - size)]


class _Digest:
    """Every piece goes in with its type and size, so that different trees differ in bytes."""

    def __init__(self, most_bytes: int | None) -> None:
        self.hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._most = most_bytes

    def add(self, part: Any) -> None:
        if isinstance(part, torch.Tensor):
            self._add_tensor(part)
        elif isinstance(part, np.ndarray | np.generic):
            self._add_array(np.asarray(part))
        elif isinstance(part, str):
            self._add_bytes("str", part.encode("utf-8", "surrogatepass"))
        elif isinstance(part, bytes | bytearray | memoryview):
            self._add_bytes("bytes", bytes(part))
        elif isinstance(part, _PLAIN):
            self._add_bytes(type(part).__name__, repr(part).encode())
        elif isinstance(part, Mapping):
            keyed = sorted(part.items(), key=lambda item: digest_sample(item[0]))
            self._add_all("dict", (side for item in keyed for side in item), 2 * len(part))
        elif isinstance(part, tuple | list):
            self._add_all("list", part, len(part))
        elif isinstance(part, set | frozenset):
            self._add_bytes("set", b"".join(sorted(map(digest_sample, part))))
        elif is_dataclass(part) and not isinstance(part, type):
            values = [getattr(part, field.name) for field in fields(part)]
            self._add_all(type(part).__qualname__, values, len(values))
        elif _is_image(part):
            self._add_bytes(f"image {part.mode} {part.size}", part.tobytes())
        else:
            self._add_bytes(type(part).__qualname__, b"")

    def _add_all(self, kind: str, parts: Iterable[Any], count: int) -> None:
        self._add_bytes(kind, str(count).encode())
        for part in parts:
            self.add(part)

    def _add_bytes(self, kind: str, content: bytes | memoryview) -> None:
        self.hash.update(f"{kind} {len(content)}:".encode())
        for piece in _spread(len(content), self._most):
            self.hash.update(content[piece])

    def _add_array(self, array: np.ndarray[Any, Any]) -> None:
        kind = f"array {array.dtype.str} {array.shape}"
        if array.dtype.hasobject:
            self._add_all(kind, array.ravel().tolist(), array.size)
            return
        self.hash.update(f"{kind} {array.nbytes}:".encode())
        flat = array.reshape(-1)
        most = None if self._most is None else self._most // max(1, array.itemsize)
        for piece in _spread(array.size, most):
            self.hash.update(flat[piece].tobytes())

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        kind = f"tensor {tensor.dtype} {tuple(tensor.shape)}"
        if not _is_plain(tensor):
            self._add_bytes(kind, b"")
            return
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        self._add_bytes(kind, as_bytes(plain).reshape(-1).data)
