"""What tests of checkpoints share."""

from __future__ import annotations

import struct

import numpy as np
import torch


def bits(value):
    """A value as something that is equal exactly if all of it is."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return type(value), value.dtype, tuple(value.shape), value.requires_grad, raw
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    if isinstance(value, complex):
        return "complex", struct.pack(">dd", value.real, value.imag)
    if isinstance(value, dict):
        extra = getattr(value, "_metadata", None)
        return type(value), [(bits(k), bits(v)) for k, v in value.items()], extra
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    return type(value), value


def damage(kind, path):
    """Do to a file what disks and people do."""
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(data[:-1])
    elif kind == "flipped":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif kind == "longer":
        path.write_bytes(data + b"\0")
    else:
        path.unlink()
