"""Divide layers over the tensor dimension, by torch's tensor parallel; the model's code stays.

Inside the model every tensor is a DTensor: torch knows of each how it lies, so shapes are those of
the whole (`view(batch, time, heads, -1)` works), and a gradient that is a sum over ranks is known
to be one. Where it meets its parameter it is brought to lie as the parameter does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.grid import DIMENSIONS, Grid
from hpctrain.tensor_parallel.planning import plan_layers
from hpctrain.world import agree

__all__ = ["split_layers"]


def split_layers(grid: Grid, model: nn.Module, patterns: Mapping[str, str]) -> nn.Module:
    """Collective: divide layers of a model over the tensor dimension; arguments must match.

    Weights become rank 0's first. Make the optimizer afterwards. Ranks of one data coordinate must
    give the model the same batch; that is checked in every forward pass.

    Args:
        grid: With a tensor dimension.
        model: Whole and built alike on every rank; changed in place.
        patterns: `{"*.up": "column", "*.down": "row", "*.embed": "vocabulary"}`; `*` stands for any
            text. See `plan_layers`.

    Returns:
        The model: its parameters are DTensors, its inputs and outputs plain tensors.

    Raises:
        ConfigError: on all ranks; what `plan_layers` refuses, or a grid with a pipeline.
    """
    plan, mistake = {}, None
    if grid.pipeline > 1:
        mistake = f"tensor: pipeline={grid.pipeline} cannot be combined with it in this version"
    try:
        plan = plan_layers(model, patterns, grid.tensor)
    except ConfigError as error:
        mistake = str(error)
    agree(grid.world.comm, mistake, error=ConfigError)
    engine = grid.engine(*DIMENSIONS)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            engine.broadcast_(tensor.data, what=name)
    mesh = grid.mesh("tensor")
    embeddings = [n for n, k in plan.items() if isinstance(model.get_submodule(n), nn.Embedding)]
    styles = {name: _style(kind, name in embeddings) for name, kind in plan.items()}
    parallelize_module(model, mesh, cast("Any", styles))
    for name in embeddings:
        # Through a plain tensor: torch cannot send a sum back into a masked lookup.
        model.get_submodule(name).register_forward_hook(lambda _, __, out: _replicate(out, mesh))
    _replicate_parameters(model, mesh)
    keep = any(kind == "vocabulary" and n not in embeddings for n, kind in plan.items())
    _Boundary(model, mesh, keep=keep)
    return model


def _style(kind: str, is_embedding: bool) -> Any:
    if is_embedding:
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if kind == "row":
        return RowwiseParallel(use_local_output=False)
    return ColwiseParallel(use_local_output=False)


def _replicate(tensor: Tensor, mesh: Any) -> Tensor:
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _replicate_parameters(model: nn.Module, mesh: Any) -> None:
    """Parameters that stay whole become DTensors, too; gradients come to lie as parameters do."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if not isinstance(parameter, DTensor) and id(parameter) not in made:
                whole = _replicate(parameter.data, mesh)
                made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module._parameters[name] = made.get(id(parameter), parameter)
    for parameter in model.parameters():
        if parameter.requires_grad:
            cast("Any", parameter).register_hook(_Settle(parameter))


class _Settle:
    """Sum a partial gradient over the tensor dimension, or cut a whole one."""

    def __init__(self, parameter: Tensor) -> None:
        self.placements = cast("Any", parameter).placements

    def __call__(self, gradient: Tensor) -> Tensor:
        given: Any = gradient
        if given.placements == self.placements:
            return gradient
        settled: Tensor = given.redistribute(placements=self.placements)
        return settled


class _Mixing(TorchFunctionMode):
    """Constants that meet a DTensor become whole ones: backward meets them again."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        given = (args, named or {})
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(given)):
            given = tree_map(self._wrap, given)
        return func(*given[0], **given[1])

    def _wrap(self, value: Any) -> Any:
        plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        return _replicate(value, self.mesh) if plain else value


class _Boundary:
    """Plain tensors outside the model, DTensors inside."""

    def __init__(self, model: nn.Module, mesh: Any, *, keep: bool) -> None:
        self.mesh, self.keep = mesh, keep
        self.forward = ExitStack()
        model.register_forward_pre_hook(self.enter, with_kwargs=True)
        model.register_forward_hook(self.leave, with_kwargs=True, always_call=True)

    def enter(self, model: nn.Module, args: Any, named: Any) -> Any:
        """Check that the ranks have the same batch, and wrap it."""
        self._check_same([x for x in tree_leaves((args, named)) if isinstance(x, Tensor)])
        self.forward.enter_context(
            implicit_replication()
        )  # for what torch makes inside an operator
        self.forward.enter_context(_Mixing(self.mesh))
        if self.mesh.device_type == "cpu":  # torch cannot divide its flash attention for CPUs
            self.forward.enter_context(sdpa_kernel(SDPBackend.MATH))

        def wrap(value: Any) -> Any:
            plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            return _replicate(value, self.mesh) if plain else value

        return tree_map(wrap, args), tree_map(wrap, named)

    def leave(self, model: nn.Module, args: Any, named: Any, out: Any) -> Any:
        """Unwrap what the model gives."""
        made = tree_map(self._unwrap, out)
        self.forward.close()
        return made

    def _unwrap(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        is_scores = value.placements[0] == Shard(value.dim() - 1)
        if not (self.keep and is_scores):
            value = value.redistribute(placements=[Replicate()]).to_local()
        return value

    def _check_same(self, tensors: list[Tensor]) -> None:
        """Collective: ranks that share layers must have the same batch."""
        if self.mesh.size() == 1:
            return
        found = [float(len(tensors))]
        for tensor in tensors:
            found += [
                float(tensor.numel()),
                float(torch.nan_to_num(tensor.detach().double()).sum()),
            ]
        first = torch.tensor(
            [sum((3 + n) * x for n, x in enumerate(found))],
            dtype=torch.float64,
            device=self.mesh.device_type,
        )
        ends = torch.cat([first, -first])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.mesh.get_group())
        if float(ends[0]) != -float(ends[1]):
            raise CollectiveError(
                "ranks that share layers were given different batches; take them from a "
                "Loader(world, data, grid=grid, ...), or give all ranks of one data coordinate "
                "the same"
            )
