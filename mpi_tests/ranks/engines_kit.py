"""What the engines' suites share: values that differ by rank, and what they give together."""

from __future__ import annotations

import functools
import operator

import torch

from hpctrain.engines import Op

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
OPS = (Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX)


def allowed(op, dtype):
    """Whether the op means something for the dtype."""
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return not (op is Op.AVERAGE and whole) and not (op in (Op.MIN, Op.MAX) and dtype.is_complex)


def values(rank, shape=(3, 4), dtype=torch.float64):
    """Small whole numbers that differ by rank and place and are exact in every dtype."""
    count = torch.Size(shape).numel()
    plain = (torch.arange(count) + rank) % 5
    if dtype is torch.bool:
        return (plain > 2).reshape(shape)
    result = plain.to(dtype)
    return (result + 1j * rank if dtype.is_complex else result).reshape(shape)


def expected(size, op, shape=(3, 4), dtype=torch.float64):
    """What all ranks together give, by torch on one process."""
    every = torch.stack([values(rank, shape, dtype) for rank in range(size)])
    if dtype is torch.bool:
        return every.all(0) if op is Op.MIN else every.any(0)
    if op in (Op.MIN, Op.MAX):
        return every.amin(0) if op is Op.MIN else every.amax(0)
    total = functools.reduce(operator.add, every)
    return total / size if op is Op.AVERAGE else total


def close(got, want):
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got, want)
