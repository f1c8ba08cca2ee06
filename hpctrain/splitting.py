"""`hpc.split`: divide a model among the ranks of a grid, before its optimizer is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

import hpctrain.tensor_parallel as tensor_parallel  # torch's tensor parallel loads slowly
from hpctrain import log
from hpctrain.errors import ConfigError
from hpctrain.grid import DIMENSIONS, Grid
from hpctrain.pipeline import StageModel, cut_model
from hpctrain.replica import broadcast_tensors, check_equal, check_structure
from hpctrain.sharding import (
    SHARDED,
    Deferred,
    build_deferred,
    choose_units,
    divides_state,
    mark_state_divided,
    match_units,
    module_facts,
    shard_model,
    sharding_of,
    trouble_with_model,
)
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.world import World

__all__ = ["split"]

_WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
_ORDER = "call split(grid, model, shard=...)"


def split(
    grid: Grid,
    model: torch.nn.Module | Sequence[torch.nn.Module] | Callable[[], torch.nn.Module],
    *,
    shard: str | None = None,
    units: Sequence[str] | None = None,
    whole_gradients: bool = False,
    stages: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
    example: torch.Tensor | Sequence[torch.Tensor] | None = None,
    tensor: Mapping[str, str] | None = None,
) -> torch.nn.Module:
    """Collective: divide a model among the ranks of a grid; every rank passes the same arguments.

    Weights become rank 0's first. Make the optimizer afterwards, over the parameters that the model
    has then, and give the grid to `distribute`.

    Args:
        grid: The ranks.
        model: Whole and built alike on every rank, on `world.device`. Or a function that builds it,
            such as `lambda: GPT(config)`, for models that fit on no rank: it is called without
            data, and each rank then makes one tensor after the other and keeps its shard. The
            values are those that one process would have.
        shard: What lies in shards over the data dimension. `parameters`: weights, gradients and the
            optimizer's state; a unit's weights are gathered just before it runs and freed
            afterwards. `gradients`: gathered weights stay from forward to backward. `state`: the
            optimizer's state alone; weights and gradients are whole, each rank updates a part of
            them. None: nothing, every rank has all of it.
        units: Patterns of module names, such as `layers.*`, that are gathered each for itself;
            None: the repeated blocks of the model.
        whole_gradients: Keep gradients whole between the backward calls of a step, and reduce them
            once: less traffic with `accumulate`, and the memory of all gradients on every rank.
            Within one call of `learn`, a stage always does: its micro-batches share one reduction.
        stages: How the model, a chain of modules, is cut along the pipeline dimension. `auto`: so
            that the slowest stage is as fast as possible; or the names of the layers at which the
            stages but the first begin; or a list of names for each stage. A list of modules is one
            for each stage, and wants `auto`.
        example: With `stages="auto"`: the inputs of one micro-batch, to measure the layers on;
            None: they are weighed by the bytes of their weights.
        tensor: Linear and embedding layers that are divided over the tensor dimension: patterns of
            their names, each with `column` (a linear layer's outputs are divided), `row` (its
            inputs), `vocabulary` (an embedding's rows, or the outputs of the last layer, whose
            scores stay divided for `vocabulary_cross_entropy`) or `cores` (the largest core of a
            tensor train).

    Returns:
        The model, changed in place; with `stages` this rank's stage, whose parameters have the
        names that they have in the whole model.

    Raises:
        ConfigError: on all ranks; an argument is wrong, or the model cannot be divided so.
    """
    if not isinstance(grid, Grid):
        raise ConfigError(
            f"split: the first argument is a {type(grid).__name__}, and must be the grid that "
            f"hpctrain.Grid(world) made; {_ORDER}"
        )
    world = grid.world
    trouble = _find_unused(shard, units, whole_gradients, stages, example)
    trouble = trouble or _find_odd_stages(grid, model, shard, stages, tensor)
    trouble = trouble or _find_odd_tensor(grid, model, shard, tensor)
    trouble = trouble or _find_odd_cores(shard, stages, tensor)
    agree(world.comm, trouble, error=ConfigError)
    _check_same(world, {"stages": repr(stages), "tensor": _order(tensor)})
    given = {"shard": shard, "units": units, "whole_gradients": whole_gradients}
    if stages is not None:
        whole = model if isinstance(model, torch.nn.Module) else _joined(model)
        agree(world.comm, _find_mistake(whole, shard, units, False), error=ConfigError)
        _check_same(world, {name: repr(value) for name, value in given.items()})
        _make_equal(grid, whole)
        own_units = () if shard is None else _choose_units(grid, whole, units)
        layers = {} if tensor is None else _plan_layers(grid, whole, tensor)
        stage = cut_model(grid, cast("torch.nn.Module", model), stages, example=example)
        _divide_stage(grid, stage, layers)
        _shard_stage(grid, stage, shard, own_units, whole_gradients=whole_gradients)
        return stage
    deferred, mistake = _build(grid, model, shard)
    module = cast("torch.nn.Module", model if deferred is None else deferred.model)
    mistake = mistake or _find_mistake(module, shard, units, deferred is not None)
    agree(world.comm, mistake, error=ConfigError)
    _check_same(world, {name: repr(value) for name, value in given.items()})
    plan = None if tensor is None else _plan_layers(grid, module, tensor)
    if shard is None and plan is None:
        return module
    if shard == "state":
        _make_equal(grid, module)
        mark_state_divided(module)
        return module
    names = () if shard is None else _choose_units(grid, module, units)
    if deferred is None:
        _make_equal(grid, module)
    if plan is not None and grid.tensor > 1:
        tensor_parallel.split_layers(grid, module, plan)
    if shard is None:
        return module
    kind = next(one for one in SHARDED if one == shard)
    shard_model(module, grid.mesh("data"), kind, names, whole_gradients=whole_gradients)
    if deferred is not None:
        deferred.materialize(world.device)
    return module


def _choose_units(
    grid: Grid, model: torch.nn.Module, units: Sequence[str] | None
) -> tuple[str, ...]:
    """Collective: the units of a whole model, which can be sharded so.

    Raises:
        ConfigError: on all ranks; it cannot.
    """
    facts, sizes = module_facts(model)
    names = choose_units(facts, sizes) if units is None else match_units(facts, units)
    agree(grid.world.comm, trouble_with_model(model, names), error=ConfigError)
    return names


def _divide_stage(grid: Grid, stage: StageModel, plan: Mapping[str, str]) -> None:
    """Collective over the tensor dimension: divide the layers of a stage, in place.

    Args:
        grid: The ranks.
        stage: This rank's.
        plan: Of the whole model; layers of other stages are left out.
    """
    if grid.tensor == 1:
        return
    own = dict(stage.named_modules())
    stage.keep_skeleton()
    tensor_parallel.split_layers(
        grid, stage, {name: kind for name, kind in plan.items() if name in own}
    )


def _shard_stage(
    grid: Grid, stage: StageModel, shard: str | None, units: Sequence[str], *, whole_gradients: bool
) -> None:
    """Collective: cut a stage into shards over the ranks that hold it, in place.

    Args:
        grid: The ranks.
        stage: This rank's.
        shard: What lies in shards; None: nothing.
        units: Of the whole model; those of other stages are left out.
        whole_gradients: As in `split`.
    """
    if shard is None:
        return
    kind = next(one for one in SHARDED if one == shard)
    own = dict(stage.named_modules())
    mine = [name for name in units if name in own]
    stage.keep_skeleton()
    shard_model(
        stage, grid.mesh("data"), kind, mine, whole_gradients=whole_gradients, in_stages=True
    )


def _build(grid: Grid, model: object, shard: object) -> tuple[Deferred | None, str | None]:
    """Collective where a function was given: build its model without data.

    Returns:
        The model to be filled, or None; and what went wrong.
    """
    is_function = callable(model) and not isinstance(model, torch.nn.Module)
    builds = is_function and shard not in (None, "state")
    told = grid.world.comm.allgather(builds)
    if not any(told):
        return None, None
    if not all(told):
        odd = log.format_ranges([rank for rank, one in enumerate(told) if not one])
        return None, f"split: rank {odd} gives a model, and the others a function; give the same"
    # All ranks draw what rank 0 would have drawn.
    torch.set_rng_state(grid.world.comm.bcast(torch.get_rng_state(), root=0))
    try:
        return build_deferred(cast("Callable[[], torch.nn.Module]", model)), None
    except ConfigError as error:
        return None, str(error)


def _find_mistake(
    model: object,
    shard: object,
    units: object,
    is_deferred: bool,
) -> str | None:
    """What is wrong with this rank's arguments, or None. Pure."""
    if not isinstance(model, torch.nn.Module):
        return (
            f"split: the model is a {type(model).__name__}, and must be a torch.nn.Module, or with "
            "shard='gradients' or 'parameters' a function that builds one"
        )
    wrapped = next((one for one in model.modules() if isinstance(one, _WRAPPERS)), None)
    if wrapped is not None:
        return (
            f"split: the model is wrapped in {type(wrapped).__name__}, which divides batches in "
            "its own way; give the model itself (its .module)"
        )
    is_divided = sharding_of(model) is not None or divides_state(model)
    if is_divided or tensor_parallel.division_of(model) is not None:
        return "split: this model is divided already; build a new one to divide it in another way"
    if shard is not None and shard not in SHARDED:
        return f"split: shard={shard!r} is unknown; choose {', '.join(map(repr, SHARDED))} or None"
    if units is not None and (isinstance(units, str) or not isinstance(units, Sequence)):
        return f"split: units={units!r} must be a list of patterns, such as ['layers.*']"
    on_meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if on_meta is not None and not is_deferred:
        return (
            f"split: {on_meta} is on the meta device, and its first values are not known; give the "
            "function that builds the model: split(grid, lambda: Model(...), shard=...)"
        )
    return None


def _plan_layers(grid: Grid, model: torch.nn.Module, tensor: Mapping[str, str]) -> dict[str, str]:
    """Collective: which layers are divided, and how.

    Raises:
        ConfigError: on all ranks; they cannot be.
    """
    plan, mistake = {}, None
    agree(grid.world.comm, tensor_parallel.trouble_with_dtensors(), error=ConfigError)
    try:
        plan = tensor_parallel.plan_layers(model, tensor, grid.tensor)
    except ConfigError as error:
        mistake = f"split: {error}"
    agree(grid.world.comm, mistake, error=ConfigError)
    return plan


def _find_odd_tensor(grid: Grid, model: object, shard: object, tensor: object) -> str | None:
    """What is wrong with `tensor`, or does not go together with it, or None. Pure."""
    if tensor is None:
        if grid.tensor > 1:
            return (
                f"split: the grid has tensor={grid.tensor}, and tensor= does not say which layers "
                "are divided; give patterns of their names, such as {'*.up': 'column', '*.down': "
                "'row'}"
            )
        return None
    pairs = tensor.items() if isinstance(tensor, Mapping) else [(None, None)]
    if not tensor or not all(isinstance(text, str) for pair in pairs for text in pair):
        return (
            f"split: tensor={tensor!r} must be patterns of names with their kinds, such as "
            "{'*.up': 'column', '*.down': 'row'}"
        )
    if shard == "state":
        return (
            "split: shard='state' and tensor= together are not in this version; use "
            "shard='gradients'"
        )
    if not isinstance(model, torch.nn.Module):
        return (
            f"split: tensor= with a {type(model).__name__}; build the model on world.device and "
            "give it: whole layers are cut into parts"
        )
    return None


def _find_odd_cores(shard: object, stages: object, tensor: object) -> str | None:
    """What does not go together with cores that are divided, or None. Pure."""
    if not isinstance(tensor, Mapping) or "cores" not in tensor.values():
        return None
    for name, value in (("shard", shard), ("stages", stages)):
        if value is not None:
            return (
                f"split: {name}={value!r} and 'cores' of tensor= together are not in this version; "
                "leave one out: a tensor train that is not divided goes with both"
            )
    return None


def _order(tensor: Mapping[str, str] | None) -> str:
    """Patterns as a text in which their order does not matter."""
    return repr(None if tensor is None else dict(sorted(tensor.items())))


def _joined(modules: object) -> torch.nn.Module:
    """A list of modules as one."""
    return torch.nn.ModuleList(cast("Sequence[torch.nn.Module]", modules))


def _find_unused(
    shard: object, units: object, whole_gradients: object, stages: object, example: object
) -> str | None:
    """Which argument would have no effect, or None. Pure."""
    if shard is None and units is not None:
        return "split: units= divides a sharded model, and shard= is not given; give shard= too"
    if shard == "state" and (units is not None or whole_gradients):
        given = f"units={units!r}" if units is not None else "whole_gradients=True"
        return f"split: {given} is about models in shards; shard='state' keeps weights whole"
    if shard is None and whole_gradients:
        return "split: whole_gradients= is about shards, and shard= is not given; give shard= too"
    if example is not None and stages != "auto":
        return "split: example= is measured with stages='auto'; leave it out"
    return None


def _find_odd_stages(
    grid: Grid, model: object, shard: object, stages: object, tensor: object
) -> str | None:
    """What of the arguments does not go together with `stages`, or None. Pure."""
    if isinstance(model, StageModel):
        return "split: this model is divided already; build a new one to divide it in another way"
    if stages is None:
        if grid.pipeline > 1:
            return (
                f"split: the grid has pipeline={grid.pipeline}, and stages= does not say how to "
                "cut the model; give stages='auto'"
            )
        return None
    if shard == "state":
        return (
            "split: shard='state' and stages= together are not in this version; use "
            "shard='gradients', or leave one of them out"
        )
    parts = model if isinstance(model, Sequence) else [model]
    odd = next((one for one in parts if not isinstance(one, torch.nn.Module)), None)
    if odd is not None:
        return (
            f"split: stages= with a {type(odd).__name__}; give a torch.nn.Module, or a list of "
            "them, one for each stage"
        )
    if any(hasattr(one, "_orig_mod") for one in parts):
        return (
            "split: stages= with a model that torch.compile has made is not in this version; give "
            "the model itself, without torch.compile"
        )
    if any(p.is_meta for one in parts for p in cast("torch.nn.Module", one).parameters()):
        return "split: stages= with a model on the meta device; build it on world.device"
    return None


def _check_same(world: World, given: dict[str, str]) -> None:
    """Collective: refuse arguments that differ between ranks."""
    everyone: list[dict[str, str]] = world.comm.allgather(given)
    for name, first in everyone[0].items():
        for rank, one in enumerate(everyone):
            if one[name] != first:
                raise ConfigError(
                    f"split: {name} is {first} on rank 0 and {one[name]} on rank {rank}; give the "
                    "same on every rank"
                )


def _make_equal(grid: Grid, model: torch.nn.Module) -> None:
    """Collective: rank 0's weights on all ranks, while each still has all of them."""
    world = grid.world
    named = [*model.named_parameters(), *model.named_buffers()]
    names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
    check_structure(world, names, tensors)
    broadcast_tensors(grid.engine(*DIMENSIONS), names, tensors)
    check_equal(world, names, tensors, "before a model is divided")
