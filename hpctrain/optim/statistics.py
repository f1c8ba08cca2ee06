"""The arithmetic of BatchNorm over several ranks, forward and backward, one message each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpctrain.engines import Engine, Op
from hpctrain.errors import ConfigError

__all__ = ["normalise"]


def normalise(
    engine: Engine, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, what: str
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Collective: normalise by the statistics over all ranks; channels and dtype must match.

    Args:
        engine: The ranks.
        x: This rank's samples, channels in dimension 1; perhaps none where no gradient is needed.
        weight: Of the channels, or None.
        bias: Of the channels, or None.
        eps: Added to the variance.
        what: The layer, for messages.

    Returns:
        The normalised samples; mean and biased variance over all ranks; values a channel over all
        ranks.

    Raises:
        ConfigError: on all ranks: fewer than two values a channel, or a rank without samples.
    """
    mean, var, count, num_empty = _gather(engine, x, what)
    if count < 2:
        raise ConfigError(
            f"{what} has {count} values a channel on all {engine.size} ranks together; a variance "
            "needs 2 or more"
        )
    wanted = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
    )
    if num_empty and wanted:
        raise ConfigError(
            f"{what}: {num_empty} of {engine.size} ranks have no samples; they make no backward "
            "pass, which the statistics of the others need; give every rank at least one sample"
        )
    function: Any = _Normalise  # torch leaves it untyped
    normal: Tensor = function.apply(x, weight, bias, mean, var, engine, eps, count, what)
    return normal, mean, var, count


def _gather(engine: Engine, x: Tensor, what: str) -> tuple[Tensor, Tensor, int, int]:
    """Collective: mean, biased variance and count over all ranks; how many ranks have nothing.

    Each rank's variance is about its own mean, so it is exact in the layer's precision; what is
    summed over ranks are a few numbers a channel in float64, where the difference of squares
    loses nothing that float32 could hold.
    """
    channels = x.shape[1]
    num_local = x.numel() // channels
    message = torch.zeros(2 * channels + 2, dtype=torch.float64, device=x.device)
    if num_local:
        wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
        local_var, local_mean = torch.var_mean(wide, dim=_others(x), correction=0)
        local_var, local_mean = local_var.double(), local_mean.double()
        message[:channels] = local_mean * num_local
        message[channels:-2] = (local_var + local_mean.square()) * num_local
        message[-2] = num_local
    else:
        message[-1] = 1.0
    engine.allreduce_(message, Op.SUM, what=f"statistics of {what}")
    count, num_empty = (int(value) for value in message[-2:].tolist())
    total, squares = message[:channels], message[channels:-2]
    mean = total / max(count, 1)
    var = (squares / max(count, 1) - mean.square()).clamp_(min=0)
    kept = torch.float64 if x.dtype == torch.float64 else torch.float32
    return mean.to(kept), var.to(kept), count, num_empty


def _others(x: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [dim for dim in range(x.dim()) if dim != 1]


class _Normalise(torch.autograd.Function):
    """Normalise by given statistics that depend on all ranks' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        engine: Engine,
        eps: float,
        count: int,
        what: str,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.engine, ctx.eps, ctx.count, ctx.what = engine, eps, count, what
        return torch.nn.functional.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Collective: the sums that the statistics need are over all ranks.

        The gradients of weight and bias are this rank's part: the exchange of gradients sums them.
        """
        x, weight, mean, var = ctx.saved_tensors
        grad = grads[0]
        if x.is_cuda:  # torch's kernel for other layouts wants statistics that it has made itself
            x, grad = x.contiguous(), grad.contiguous()
        direct, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.stack([of_bias, of_weight])  # of the gradient; of it times the normalised x
        ctx.engine.allreduce_(sums, Op.SUM, what=f"gradient of {ctx.what}")
        inverse = (var + ctx.eps).rsqrt()
        gain = inverse if weight is None else inverse * weight
        slope = gain * inverse * sums[1] / ctx.count
        offset = gain * sums[0] / ctx.count - slope * mean
        shape = [1, -1, *([1] * (x.dim() - 2))]
        of_x = torch.addcmul(direct - offset.view(shape), x, slope.view(shape), value=-1)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return (
            of_x.to(x.dtype),
            of_weight if needs_weight else None,
            of_bias if needs_bias else None,
            *([None] * 6),
        )
