"""A batch and the cores of a tensor train, multiplied in a given order: plain products."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from hpctrain.nn.factors import TrainShape
from hpctrain.nn.orders import Join, LookupOrder, ProductOrder

__all__ = ["look_up", "multiply_batch"]


def multiply_batch(
    flat: Tensor, cores: Sequence[Tensor], shape: TrainShape, order: ProductOrder
) -> Tensor:
    """(batch, row factors) from (batch, padded columns) and the cores."""
    factors = list(cores)
    factors[0], factors[-1] = factors[0].squeeze(0), factors[-1].squeeze(-1)
    operands: list[Tensor] = [flat.reshape(-1, *shape.column_factors), *factors]
    for join in order.joins:
        operands.append(_contract(operands[join.left], operands[join.right], join))
    return operands[-1].permute(order.permutation)


def look_up(flat: Tensor, cores: Sequence[Tensor], shape: TrainShape, order: LookupOrder) -> Tensor:
    """(batch, padded columns): the rows of these numbers; those from `shape.rows` on are refused.

    In the dtype of the cores, under autocast too.
    """
    operands: list[Tensor] = list(cores)
    kind = "cpu" if flat.is_meta else flat.device.type  # there is no autocast on meta
    with torch.autocast(kind, enabled=False):
        for step in order.steps:
            a, b = operands[step.left], operands[step.right]
            if step.kind == "merge":
                made = _merge(a, b)
            elif step.kind == "gather":
                made = _gather(a, _digit(flat, shape, step.first, step.last))
            else:
                made = _multiply(a, b)
            operands.append(made)
    return operands[-1].reshape(-1, shape.padded_columns)


def _digit(ids: Tensor, shape: TrainShape, first: int, last: int) -> Tensor:
    """The digits of cores first..last as one number."""
    factors = shape.row_factors
    stride, size = math.prod(factors[last + 1 :]), math.prod(factors[first : last + 1])
    digit = torch.div(ids, stride, rounding_mode="floor")
    if first:
        return digit.remainder(size)
    # A row of the padding is no row: it is made a number that the gather itself refuses.
    return digit.masked_fill(ids >= shape.rows, size)


def _contract(a: Tensor, b: Tensor, join: Join) -> Tensor:
    """`torch.tensordot`, which autocast does not know, by a product of matrices, which it does."""
    of_a = [n for n in range(a.dim()) if n not in join.left_dims]
    of_b = [n for n in range(b.dim()) if n not in join.right_dims]
    inner = math.prod([a.shape[n] for n in join.left_dims])
    left = a.permute(*of_a, *join.left_dims).reshape(-1, inner)
    right = b.permute(*join.right_dims, *of_b).reshape(inner, -1)
    return (left @ right).reshape([a.shape[n] for n in of_a] + [b.shape[n] for n in of_b])


def _merge(a: Tensor, b: Tensor) -> Tensor:
    """Two neighbouring tables as one: the rows of both, the columns of both."""
    product: Tensor = torch.tensordot(a, b, dims=1).permute(0, 1, 3, 2, 4, 5)
    rows, columns = a.shape[1] * b.shape[1], a.shape[2] * b.shape[2]
    return product.reshape(a.shape[0], rows, columns, b.shape[3])


def _gather(table: Tensor, rows: Tensor) -> Tensor:
    """(batch, rank before, columns, rank after) of these rows."""
    before, _, columns, after = table.shape
    return embedding(rows, table.transpose(0, 1).flatten(1)).reshape(-1, before, columns, after)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Two neighbouring stacks of rows as one."""
    product = torch.bmm(a.flatten(1, 2), b.flatten(2))
    return product.reshape(-1, a.shape[1], a.shape[2] * b.shape[2], b.shape[3])
