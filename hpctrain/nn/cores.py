"""Cores of a tensor train as tensors: from a matrix by TT-SVD, back to a matrix, and at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.nn.factors import TrainShape

__all__ = ["Decomposition", "decompose", "draw", "multiply_out", "relative_error"]


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A matrix as a tensor train."""

    shape: TrainShape
    cores: list[Tensor]
    error: float
    """Relative error in the Frobenius norm, with cores in the matrix's dtype."""


@torch.no_grad()
def decompose(matrix: Tensor, shape: TrainShape, *, error: float | None = None) -> Decomposition:
    """Factorise a matrix by successive singular value decompositions, in float64.

    Args:
        matrix: Of `shape.rows` x `shape.columns`; padding counts as zeros.
        shape: Its ranks are the largest that are used.
        error: Relative error that may be made: the ranks are the smallest that stay within it.

    Raises:
        ConfigError: the error is out of reach in the matrix's dtype.
    """
    held = torch.zeros(shape.padded_rows, shape.padded_columns, dtype=torch.float64)
    held = held.to(matrix.device)
    held[: shape.rows, : shape.columns] = matrix
    norm = float(held.norm())
    if not math.isfinite(norm):
        raise ConfigError("the weight has inf or nan in it, and cannot be factorised")
    left = _budget(error, matrix.dtype, shape.num_cores) * norm**2
    rest = _pair_digits(held, shape)
    cores, ranks, before = [], [], 1
    for number, most in enumerate(shape.ranks):
        size = shape.row_factors[number] * shape.column_factors[number]
        u, s, vh = torch.linalg.svd(rest.reshape(before * size, -1), full_matrices=False)
        rank, lost = _cut(s, most, left / (len(shape.ranks) - number))
        left -= lost
        cores.append(u[:, :rank].reshape(before, *_factors(shape, number), rank))
        rest, before = s[:rank, None] * vh[:rank], rank
        ranks.append(rank)
    cores.append(rest.reshape(before, *_factors(shape, shape.num_cores - 1), 1))
    shape = replace(shape, ranks=tuple(ranks))
    # Each core gets the same norm: one learning rate suits all, and float16 overflows last.
    scale = math.prod(float(core.norm()) for core in cores) ** (1 / len(cores))
    cores = [core * (scale / float(core.norm())) if scale else core for core in cores]
    cores = [core.to(matrix.dtype).contiguous() for core in cores]
    made = relative_error(cores, shape, matrix)
    if error is not None and made > error:
        raise ConfigError(_out_of_reach(error, matrix.dtype, f"{made:.2g} is what it gives"))
    return Decomposition(shape, cores, made)


def _budget(error: float | None, dtype: torch.dtype, num_cores: int) -> float:
    """The squared relative error for cutting ranks: the rounding of the cores is taken off."""
    if error is None:
        return 0.0
    rounding = num_cores * (torch.finfo(dtype).eps / 2) ** 2
    if error**2 <= rounding:
        raise ConfigError(_out_of_reach(error, dtype, f"rounding gives {math.sqrt(rounding):.2g}"))
    return error**2 - rounding


def _out_of_reach(error: float, dtype: torch.dtype, why: str) -> str:
    return f"error={error:g} is out of reach in {dtype}: {why}; give a larger one, or ranks"


def _cut(values: Tensor, most: int, budget: float) -> tuple[int, float]:
    """How many singular values stay, and the sum of squares of the others."""
    squares = values.square()
    tails = squares.flip(0).cumsum(0).flip(0).tolist()  # what is lost if all from here on go
    # Zeros within rounding carry nothing: a low-rank matrix gets its own rank.
    floor = tails[0] * torch.finfo(values.dtype).eps ** 2 * len(tails)
    enough = next((n for n, lost in enumerate(tails) if lost <= max(budget, floor)), len(tails))
    rank = max(1, min(enough, most))
    return rank, tails[rank] if rank < len(tails) else 0.0


def _factors(shape: TrainShape, number: int) -> tuple[int, int]:
    return shape.row_factors[number], shape.column_factors[number]


def _pair_digits(matrix: Tensor, shape: TrainShape) -> Tensor:
    """From (all row digits, all column digits) to row and column digit by turns."""
    count = shape.num_cores
    turns = [side * count + number for number in range(count) for side in (0, 1)]
    return matrix.reshape(*shape.row_factors, *shape.column_factors).permute(turns)


def multiply_out(cores: Sequence[Tensor], shape: TrainShape) -> Tensor:
    """The matrix of the cores, without its padding; gradients flow through."""
    product = cores[0].flatten(0, 2)
    for core in cores[1:]:
        product = (product @ core.flatten(1)).reshape(-1, core.shape[-1])
    count = shape.num_cores
    digits = product.reshape([f for k in range(count) for f in _factors(shape, k)])
    turns = [*range(0, 2 * count, 2), *range(1, 2 * count, 2)]
    dense = digits.permute(turns).reshape(shape.padded_rows, shape.padded_columns)
    return dense[: shape.rows, : shape.columns]


@torch.no_grad()
def relative_error(cores: Sequence[Tensor], shape: TrainShape, matrix: Tensor) -> float:
    """Norm of the difference over the norm of the matrix, in float64; 0 for two zeros."""
    exact = matrix.double()
    apart = float((multiply_out([core.double() for core in cores], shape) - exact).norm())
    return apart / float(exact.norm()) if apart else 0.0


@torch.no_grad()
def draw(cores: Sequence[Tensor], shape: TrainShape, *, variance: float) -> None:
    """Draw the cores from normal distributions so that the matrix has this variance.

    An element of the matrix is a sum over all values of the ranks of a product of one element of
    each core. The terms are uncorrelated: its variance is the product of ranks and variances.
    """
    each = (variance / math.prod(shape.ranks)) ** (1 / (2 * shape.num_cores))
    for core in cores:
        core.normal_(0.0, each)
