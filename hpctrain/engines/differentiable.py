"""Collectives that autograd goes through, for models that need other ranks' outputs.

Gradients are those of the sum of all ranks' losses. The backward pass communicates too: every rank
gives an input that requires gradients, uses the result, and calls `backward()`, in the same order.
They can be differentiated twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.engines import encoding
from hpctrain.engines.base import Engine
from hpctrain.engines.encoding import Op, as_op
from hpctrain.errors import ConfigError

__all__ = ["allgather", "allreduce", "alltoall", "reduce_scatter"]

_LINEAR = (Op.SUM, Op.AVERAGE)


def allreduce(engine: Engine, tensor: Tensor, op: Op = Op.SUM, *, what: str = "") -> Tensor:
    """Collective: combine over all ranks into a new tensor; sum or average."""
    return _apply(_Allreduce, engine, tensor, _linear(op, "allreduce"), what)


def allgather(engine: Engine, tensor: Tensor, *, what: str = "") -> Tensor:
    """Collective: join all ranks' rows; their numbers may differ."""
    return _apply(_Allgather, engine, tensor, what)


def reduce_scatter(engine: Engine, tensor: Tensor, op: Op = Op.SUM, *, what: str = "") -> Tensor:
    """Collective: combine and keep this rank's share of the rows; sum or average."""
    return _apply(_ReduceScatter, engine, tensor, _linear(op, "reduce_scatter"), what)


def alltoall(
    engine: Engine, tensor: Tensor, splits: Sequence[int] | None = None, *, what: str = ""
) -> tuple[Tensor, list[int]]:
    """Collective: send `splits[r]` rows to rank r; returns the received rows and their counts."""
    received: list[int] = []  # filled by the forward pass: autograd returns tensors only
    given = None if splits is None else list(splits)
    result = _apply(_Alltoall, engine, tensor, given, received, what)
    return result, received


def _apply(function: Any, *arguments: object) -> Tensor:
    result: Tensor = function.apply(*arguments)  # torch leaves it untyped
    return result


def _linear(op: Op, call: str) -> Op:
    op = as_op(op)
    if op not in _LINEAR:
        raise ConfigError(f"{call}: {op.value} has no gradient; use sum or average")
    return op


class _Allreduce(torch.autograd.Function):
    """Linear and symmetric, so it is its own gradient."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, tensor: Tensor, op: Op, what: str) -> Tensor:
        ctx.engine, ctx.op, ctx.what = engine, op, what
        return engine.allreduce_(tensor.detach().clone(), op, what=what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = allreduce(ctx.engine, grads[0], ctx.op, what=f"gradient of {ctx.what}".strip())
        return None, grad, None, None


class _Allgather(torch.autograd.Function):
    """Every rank's result has this rank's rows, so their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, tensor: Tensor, what: str) -> Tensor:
        joined, num_rows = engine.allgather_rows(tensor.detach(), what=what)
        ctx.engine, ctx.num_rows, ctx.what, ctx.shape = engine, num_rows, what, tensor.shape
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = _sum_rows(ctx.engine, grads[0], ctx.num_rows, f"gradient of {ctx.what}".strip())
        return None, grad.reshape(ctx.shape), None


class _ReduceScatter(torch.autograd.Function):
    """The transpose of allgather."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, tensor: Tensor, op: Op, what: str) -> Tensor:
        ctx.engine, ctx.op, ctx.what = engine, op, what
        return engine.reduce_scatter(tensor.detach(), op, what=what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = allgather(ctx.engine, grads[0], what=f"gradient of {ctx.what}".strip())
        return None, grad / ctx.engine.size if ctx.op is Op.AVERAGE else grad, None, None


class _Alltoall(torch.autograd.Function):
    """A permutation of all ranks' rows; its gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        tensor: Tensor,
        splits: list[int] | None,
        received: list[int],
        what: str,
    ) -> Tensor:
        came, rows_from = engine.alltoall(tensor.detach(), splits, what=what)
        received[:] = rows_from
        ctx.engine, ctx.rows_from, ctx.what = engine, rows_from, what
        return came

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        what = f"gradient of {ctx.what}".strip()
        grad, _ = alltoall(ctx.engine, grads[0], ctx.rows_from, what=what)
        return None, grad, None, None, None


def _sum_rows(engine: Engine, grad: Tensor, num_rows: list[int], what: str) -> Tensor:
    """Collective: sum over ranks, of which this rank keeps the rows it had given."""
    if num_rows == encoding.shares(grad.shape[0], engine.size):
        return reduce_scatter(engine, grad, what=what)
    came, _ = alltoall(engine, grad, num_rows, what=what)
    return came.view(engine.size, num_rows[engine.rank], *grad.shape[1:]).sum(0)
