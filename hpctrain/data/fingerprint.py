"""Digests of samples: whether ranks read the same data, without sending them. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from hpctrain.data.columns import as_bytes

__all__ = ["digest_sample", "is_read", "show_sample"]

_DIGEST_BYTES = 8
_SHOWN = 48
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))


def digest_sample(sample: Any) -> bytes:
    """A short digest of what a sample holds.

    Equal samples have equal digests in every process: nothing depends on addresses, on hash seeds
    or on how an array lies in memory. Of objects that nobody knows how to read, only the type
    counts: their pickles may differ where they are equal.

    Args:
        sample: Tensors, arrays, numbers, text, bytes, images and dataclasses, alone or in tuples,
            lists, sets and dicts.
    """
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _add(found, sample)
    return found.digest()


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


def _add(found: Any, part: Any) -> None:
    """Every piece goes in with its type and its size, so that no two trees read alike."""
    if isinstance(part, torch.Tensor):
        _add_tensor(found, part)
    elif isinstance(part, np.ndarray | np.generic):
        _add_array(found, np.asarray(part))
    elif isinstance(part, str):
        _add_bytes(found, "str", part.encode("utf-8", "surrogatepass"))
    elif isinstance(part, bytes | bytearray | memoryview):
        _add_bytes(found, "bytes", bytes(part))
    elif isinstance(part, _PLAIN):
        _add_bytes(found, type(part).__name__, repr(part).encode())
    elif isinstance(part, Mapping):
        keyed = sorted(part.items(), key=lambda item: digest_sample(item[0]))
        _add_all(found, "dict", (side for item in keyed for side in item), 2 * len(part))
    elif isinstance(part, tuple | list):
        _add_all(found, "list", part, len(part))
    elif isinstance(part, set | frozenset):
        _add_bytes(found, "set", b"".join(sorted(map(digest_sample, part))))
    elif is_dataclass(part) and not isinstance(part, type):
        values = [getattr(part, field.name) for field in fields(part)]
        _add_all(found, type(part).__qualname__, values, len(values))
    elif _is_image(part):
        _add_bytes(found, f"image {part.mode} {part.size}", part.tobytes())
    else:
        _add_bytes(found, type(part).__qualname__, b"")


def _add_all(found: Any, kind: str, parts: Iterable[Any], count: int) -> None:
    _add_bytes(found, kind, str(count).encode())
    for part in parts:
        _add(found, part)


def _add_bytes(found: Any, kind: str, content: bytes | memoryview) -> None:
    found.update(f"{kind} {len(content)}:".encode())
    found.update(content)


def _add_array(found: Any, array: np.ndarray[Any, Any]) -> None:
    kind = f"array {array.dtype.str} {array.shape}"
    if array.dtype.hasobject:
        _add_all(found, kind, array.ravel().tolist(), array.size)
    else:
        _add_bytes(found, kind, np.ascontiguousarray(array).tobytes())


def _add_tensor(found: Any, tensor: torch.Tensor) -> None:
    kind = f"tensor {tensor.dtype} {tuple(tensor.shape)}"
    if not _is_plain(tensor):
        _add_bytes(found, kind, b"")
        return
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    _add_bytes(found, kind, as_bytes(plain).tobytes())
