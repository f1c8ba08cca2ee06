"""Which dtypes safetensors files can name. The others are stored as bytes, and named in the tree.

Only names that every supported version of the safetensors package reads are used.
"""

from __future__ import annotations

import torch

from hpctrain.errors import CheckpointError

__all__ = ["dtype_name", "named_dtype", "safetensors_name"]

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
