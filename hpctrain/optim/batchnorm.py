"""BatchNorm over several ranks: one set of statistics, as for one big batch.

Forward and backward send one message each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.engines import Engine, Op
from hpctrain.errors import ConfigError
from hpctrain.world import World, roll_call

if TYPE_CHECKING:
    from hpctrain.grid import Grid

__all__ = ["SyncBatchNorm", "average_batchnorm", "normalise", "sync_batchnorm"]


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
            "pass, but synchronized statistics need it on all ranks; give every rank at least one "
            "sample"
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
        if x.is_cuda:  # torch's kernel for other layouts needs statistics that it computed itself
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


_CONVERTED: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
    nn.SyncBatchNorm: (2, 3, 4, 5),
}


class _Link:
    """An engine that a module holds: copies of the module share it, and pickles leave it out."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine
        # torch.compile must not look into a collective. Here, and not as a decorator: it imports
        # the compiler, which takes a second that only those who share statistics should pay.
        disable: Any = torch.compiler.disable  # torch leaves it untyped
        self.normalise = disable(normalise) if engine is not None else normalise

    def __deepcopy__(self, memo: dict[int, Any]) -> _Link:
        return self

    def __reduce__(self) -> tuple[type[_Link], tuple[()]]:
        return _Link, ()


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose batch statistics are those of all ranks of an engine.

    Collective when it uses batch statistics: in training, and in evaluation too when it tracks
    none. Made by `sync_batchnorm`; its state dict is that of the layer that it replaces.
    """

    dims: tuple[int, ...]
    name: str
    link: _Link

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self.dims:
            raise ConfigError(
                f"{self.name} got an input of shape {tuple(input.shape)}; it takes "
                f"{' or '.join(map(str, self.dims))} dimensions"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Collective when batch statistics are used: normalise.

        Every rank calls it equally often and in the same order; batches may have different sizes.

        Raises:
            ConfigError: on all ranks: fewer than two values a channel over all ranks, or a rank
                without samples whose backward pass the others would wait for.
        """
        self._check_input_dim(input)
        tracked = self.running_mean is not None and self.running_var is not None
        if not self.training and tracked:
            fixed: Tensor = batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
            return fixed
        engine = self.link.engine
        if engine is None:
            raise ConfigError(
                f"{self.name} was loaded from a file and has no engine; call "
                "hpctrain.optim.sync_batchnorm(engine, model) again"
            )
        found: tuple[Tensor, Tensor, Tensor, int] = self.link.normalise(
            engine, input, self.weight, self.bias, self.eps, self.name
        )
        normal, mean, var, count = found
        if self.training and self.track_running_stats:
            self._track(mean, var, count)
        return normal

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Update the running statistics as torch does, with the count of all ranks."""
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is not None:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        if self.running_var is not None:
            unbiased = var * (count / (count - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)

    def extra_repr(self) -> str:
        """What torch says of a BatchNorm, and over how many ranks."""
        ranks = self.link.engine.size if self.link.engine is not None else "no"
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{text}, {ranks} ranks"


def sync_batchnorm(engine: Engine, model: nn.Module, *, group_size: int | None = None) -> Engine:
    """Collective: give every BatchNorm1d, 2d and 3d of a model the statistics of many ranks.

    Forward and backward are then those of one big batch, also when ranks have batches of different
    sizes. Gradients are those of the sum of all ranks' losses. `replica.backward` weighs each loss
    before it differentiates, so no factor is needed. Each layer costs one small message in the
    forward pass and one in the backward pass, and waits for the slowest rank in both.

    Args:
        engine: Whose ranks share statistics. Give the same to `hpctrain.distribute`, so that
            messages of both go in one order.
        model: Changed in place, before `hpctrain.distribute`; parameters stay the same objects.
        group_size: Share among this many consecutive ranks instead of all, as on one node; it must
            divide the number of ranks. For other groups give a part: `engine.split(color)`.

    Returns:
        The engine that the layers use: the one given, or the part of it that `group_size` made.

    Raises:
        ConfigError: there is none to convert, or one that cannot be.
    """
    if not isinstance(engine, Engine):
        raise ConfigError(
            f"sync_batchnorm needs an engine and got {type(engine).__name__}; make one by "
            "engine = hpctrain.connect(world).engine, and give it to distribute(engine=engine) too"
        )
    if group_size is not None and (group_size < 1 or engine.size % group_size):
        raise ConfigError(
            f"group_size={group_size} does not divide the {engine.size} ranks; choose one of "
            f"{', '.join(str(n) for n in range(1, engine.size + 1) if engine.size % n == 0)}"
        )
    layers = _batchnorms(model)
    part = engine
    if group_size is not None and group_size < engine.size:
        split = engine.split(engine.rank // group_size)
        part = split if split is not None else engine  # every rank has a color: never None
    for name, layer in layers.items():
        if not isinstance(layer, SyncBatchNorm):
            dims = _CONVERTED[type(layer)]
            # In place: hooks, shared modules and references stay valid.
            layer.__class__ = SyncBatchNorm
            vars(layer).update(dims=dims, name=name)
        vars(layer)["link"] = _Link(part)
    return part


def average_batchnorm(over: World | Grid, model: nn.Module) -> None:
    """Collective: replace running statistics that differ between ranks by their average.

    For BatchNorm with each rank's own statistics: call it before evaluation and before a
    checkpoint, so that all ranks evaluate, and one rank saves, the same model. The average of the
    variances leaves out how far the ranks' means lie apart, as it does over one rank's batches.

    Args:
        over: The ranks; a grid where the model is in stages, each of which has its own layers.
        model: Built the same on every rank; its running means and variances are averaged, and
            `num_batches_tracked` becomes the largest.

    Raises:
        ConfigError: there is no BatchNorm; or the model is in stages, and the grid was not given.
        CollectiveError: a rank did not arrive.
    """
    from mpi4py import MPI

    if isinstance(over, World) and hasattr(model, "hpctrain_cut"):
        raise ConfigError(
            "average_batchnorm(world, model): the model is in stages with different layers; call "
            "average_batchnorm(grid, model)"
        )
    if not isinstance(over, World) and not any(isinstance(m, _BatchNorm) for m in model.modules()):
        return  # another stage may have some
    floats = [
        buffer
        for layer in _batchnorms(model).values()
        for buffer in (layer.running_mean, layer.running_var)
        if buffer is not None
    ]
    counters = [
        layer.num_batches_tracked
        for layer in _batchnorms(model).values()
        if layer.num_batches_tracked is not None
    ]
    comm = over.comm if isinstance(over, World) else over.comm("data")
    if not floats:
        return
    summed = torch.cat([buffer.detach().double().cpu().flatten() for buffer in floats]).numpy()
    counted = torch.stack([counter.cpu() for counter in counters]).numpy()
    roll_call(comm, "averaging BatchNorm statistics")
    comm.Allreduce(MPI.IN_PLACE, summed, MPI.SUM)
    comm.Allreduce(MPI.IN_PLACE, counted, MPI.MAX)
    average = torch.from_numpy(summed) / comm.Get_size()
    with torch.no_grad():
        parts = torch.split(average, [buffer.numel() for buffer in floats])
        for buffer, part in zip(floats, parts, strict=True):
            buffer.copy_(part.view_as(buffer))
        for counter, value in zip(counters, torch.from_numpy(counted), strict=True):
            counter.copy_(value)


def _batchnorms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers of a model by name.

    Raises:
        ConfigError: there are none, or one is of a kind that is not known here.
    """
    found: dict[str, _BatchNorm] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        if type(layer) not in (*_CONVERTED, SyncBatchNorm):
            raise ConfigError(
                f"{name or 'the modelf'} is a {type(layer).__name__}, whose statistics hpctrain "
                f"does not support; use {', '.join(kind.__name__ for kind in _CONVERTED)} (a lazy "
                "one "
                "after its first batch)"
            )
        found[name or type(layer).__name__] = layer
    if not found:
        raise ConfigError(f"{type(model).__name__} has no BatchNorm layer; leave the call out")
    return found
