"""Divide layers over the tensor dimension, by torch's tensor parallel; the model's code stays.

Inside the model every tensor is a DTensor: torch knows of each how it lies, so shapes are those of
the whole (`view(batch, time, heads, -1)` works), and a gradient that is a sum over ranks is known
to be one. Where it meets its parameter it is brought to lie as the parameter does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpctrain.grid import Grid
from hpctrain.tensor_parallel.boundary import Boundary, replicate
from hpctrain.tensor_parallel.planning import DividesItself, Division
from hpctrain.tensor_parallel.running import ModuleOrder

__all__ = ["split_layers"]


def split_layers(grid: Grid, model: nn.Module, plan: Mapping[str, str]) -> Division:
    """Collective over the tensor dimension: divide layers of a model, in place.

    Its parameters become DTensors; its inputs and outputs stay plain tensors, but for scores that
    are divided by classes. In every forward pass ranks of one data coordinate must give the model
    the same batch; that is checked.

    Args:
        grid: With a tensor dimension.
        model: Whole, with the same weights on every rank.
        plan: As `plan_layers` gave it.
    """
    mesh = grid.mesh("tensor")
    tied = _ties(model)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    embeddings = [n for n in plan if isinstance(model.get_submodule(n), nn.Embedding)]
    styles = {
        name: _style(kind, name in embeddings) for name, kind in plan.items() if kind != "cores"
    }
    with warnings.catch_warnings():
        # torch 2.6 says so of CPUs; what draws random numbers is refused here.
        warnings.filterwarnings("ignore", "DTensor random operators may not have")
        if styles:  # a stage of a pipeline may have none of the divided layers
            parallelize_module(model, mesh, cast("Any", styles))
    for name, kind in plan.items():
        if kind == "cores":
            cast("DividesItself", model.get_submodule(name)).divide_cores(mesh)
    for name in embeddings:
        # Through a plain tensor: torch cannot send a sum back into a masked lookup.
        model.get_submodule(name).register_forward_hook(lambda _, __, out: replicate(out, mesh))
    for names in tied:
        _tie(model, names)
    for name in frozen:  # torch makes new parameters, which train
        model.get_parameter(name).requires_grad_(False)
    _replicate_parameters(model, mesh)
    keep = any(kind == "vocabulary" and n not in embeddings for n, kind in plan.items())
    Boundary(model, mesh, keep=keep)
    division = Division(dict(plan), mesh, ModuleOrder(model))
    division.mark(model)
    return division


def _ties(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _tie(model: nn.Module, names: Sequence[str]) -> None:
    """Make parameters one tensor again: torch has divided each for itself."""
    first = model.get_parameter(names[0])
    for name in names[1:]:
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._parameters[own] = first


def _style(kind: str, is_embedding: bool) -> Any:
    if is_embedding:
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if kind == "row":
        return RowwiseParallel(use_local_output=False)
    return ColwiseParallel(use_local_output=False)


def _replicate_parameters(model: nn.Module, mesh: Any) -> None:
    """Parameters that stay whole become DTensors, too; gradients come to lie as parameters do."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if not isinstance(parameter, DTensor) and id(parameter) not in made:
                whole = replicate(parameter.data, mesh)
                made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module._parameters[name] = made.get(id(parameter), parameter)
    for parameter in model.parameters():
        is_trained = parameter.requires_grad
        if parameter.is_floating_point():  # frozen ones, too: they may be unfrozen later
            parameter.requires_grad_(True)
            cast("Any", parameter).register_hook(_Settle(parameter))
            parameter.requires_grad_(is_trained)


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
