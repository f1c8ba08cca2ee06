"""From a model that every rank has built to the stage that this rank keeps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hpctrain.errors import ConfigError
from hpctrain.pipeline.balancing import balance_stages
from hpctrain.pipeline.chain import Layer, chain_of
from hpctrain.pipeline.cutting import (
    Cut,
    StageModel,
    Stages,
    cut_at,
    find_ties,
    trouble_with_stages,
)
from hpctrain.pipeline.measuring import measure_layers, weigh_layers
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.grid import Grid

__all__ = ["AUTO", "cut_model"]

AUTO = "auto"


def cut_model(
    grid: Grid,
    model: nn.Module | Sequence[nn.Module],
    stages: str | Stages = AUTO,
    *,
    example: Tensor | Sequence[Tensor] | None = None,
    limit_bytes: int | None = None,
) -> StageModel:
    """Collective: this rank's stage of a model that all ranks have built alike.

    The other stages' weights are freed with the model. Make the optimizer from what is returned.

    Args:
        grid: Its `pipeline` dimension says how many stages.
        model: A chain of modules: an `nn.Sequential`, a list with one module for each stage, or a
            module whose forward calls its modules one after the other.
        stages: `auto`: so that the slowest stage is as fast as possible; or the names of the layers
            at which the stages but the first begin; or a list of names for each stage.
        example: The inputs of one micro-batch, on which `auto` measures the layers (on rank 0).
            Without it they are weighed by the bytes of their weights.
        limit_bytes: With `auto`: the most bytes of weights, gradients, state and activations that a
            stage may have.

    Raises:
        ConfigError: on all ranks; the model is no chain, or `stages` does not fit it.
    """
    comm = grid.comm("data", "pipeline", "tensor")
    trouble: str | None = None
    layers: tuple[Layer, ...] = ()
    given: str | Stages = stages
    try:
        _check_options(stages, example, limit_bytes)
        layers, given = _layers_of(model, stages, grid.pipeline)
    except ConfigError as error:
        trouble = str(error)
    agree(comm, trouble, error=ConfigError)
    names = tuple(layer.name for layer in layers)
    found: tuple[tuple[range, ...], str] | None = None
    if comm.Get_rank() == 0:
        try:
            found = _divide(layers, given, grid.pipeline, _as_inputs(example), limit_bytes)
        except ConfigError as error:
            trouble = str(error)
    agree(comm, trouble, error=ConfigError)
    told: tuple[tuple[range, ...], str, int] = comm.bcast(
        None if found is None else (*found, _digest(layers)), root=0
    )
    ranges, why, digest = told
    try:
        _check_alike(digest, layers)
        cut = Cut(names, ranges, find_ties(layers, ranges), why, **_whole_facts(model))
        made = StageModel(layers, cut, grid.coordinate.pipeline)
        _check_trainable(made)
    except ConfigError as error:
        trouble = str(error)
    agree(comm, trouble, error=ConfigError)
    return made


def _check_options(stages: str | Stages, example: object, limit_bytes: int | None) -> None:
    trouble = None if isinstance(stages, str) and stages == AUTO else trouble_with_stages(stages)
    if trouble is not None:
        raise ConfigError(trouble)
    parts = () if example is None or isinstance(example, Tensor) else example
    if not isinstance(parts, Sequence) or not all(isinstance(one, Tensor) for one in parts):
        raise ConfigError(
            f"example is {type(example).__name__}; give the model's inputs: a tensor, or a list of "
            "tensors"
        )
    if stages != AUTO and (example is not None or limit_bytes is not None):
        raise ConfigError("example and limit_bytes are for stages='auto'; leave them out")


def _as_inputs(example: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...] | None:
    if example is None:
        return None
    return (example,) if isinstance(example, Tensor) else tuple(example)


def _layers_of(
    model: nn.Module | Sequence[nn.Module], stages: str | Stages, num_stages: int
) -> tuple[tuple[Layer, ...], str | Stages]:
    """The chain, and where it is to be cut: a list of modules says that itself."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return chain_of(model), stages
    modules = list(model)
    odd = next((one for one in modules if not isinstance(one, nn.Module)), None)
    if odd is not None:
        raise ConfigError(f"a list of stages has {type(odd).__name__} in it; give modules")
    if len(modules) != num_stages or stages != AUTO:
        raise ConfigError(
            f"a list of {len(modules)} modules is one module for each stage, and the grid has "
            f"pipeline={num_stages}; give as many, without stages=, or an nn.Sequential of them"
        )
    layers = tuple(Layer(str(number), one) for number, one in enumerate(modules))
    return layers, [str(number) for number in range(1, num_stages)]


def _divide(
    layers: Sequence[Layer],
    stages: str | Stages,
    num_stages: int,
    example: tuple[Tensor, ...] | None,
    limit_bytes: int | None,
) -> tuple[tuple[range, ...], str]:
    names = [layer.name for layer in layers]
    if not isinstance(stages, str):
        return cut_at(names, stages, num_stages), "as given"
    if example is None:
        costs, how = weigh_layers(layers), "balanced by the bytes of their weights"
    else:
        costs, how = measure_layers(layers, example), "balanced by the measured times of the layers"
    ranges = balance_stages(costs, num_stages, limit_bytes=limit_bytes)
    loads = [sum(costs[n].seconds for n in own) for own in ranges]
    mean = sum(loads) / len(loads)
    over = max(loads) / mean if mean else 1.0
    return ranges, f"{how}; the largest is {over:.2f} x the mean"


def _digest(layers: Sequence[Layer]) -> int:
    """Of names and shapes; the weights are made equal later."""
    text = [
        (layer.name, type(layer.module).__name__, name, tuple(tensor.shape), str(tensor.dtype))
        for layer in layers
        for name, tensor in layer.module.named_parameters()
    ]
    return zlib.crc32(repr((text, [layer.name for layer in layers])).encode())


def _whole_facts(model: nn.Module | Sequence[nn.Module]) -> dict[str, Any]:
    """What a checkpoint of the whole model has.

    Raises:
        ConfigError: it has something that is no tensor.
    """
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    state = whole.state_dict()
    odd = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise ConfigError(f"{odd} of the model's state is no tensor; a stage can hold tensors only")
    first = {id(p): name for name, p in whole.named_parameters()}
    return {
        "tensors": tuple((name, tuple(t.shape), t.dtype) for name, t in state.items()),
        "parameters": tuple(first.values()),
        "first_names": {
            name: first[id(p)] for name, p in whole.named_parameters(remove_duplicate=False)
        },
    }


def _check_alike(digest: int, layers: Sequence[Layer]) -> None:
    if digest != _digest(layers):
        raise ConfigError(
            "the layers or their parameters differ from rank 0's; build the model alike on every "
            "rank, before anything depends on the rank"
        )


def _check_trainable(model: StageModel) -> None:
    if next(model.parameters(), None) is None:
        stage = model.hpctrain_stage
        layers = ", ".join(model.hpctrain_cut.names_of(stage))
        raise ConfigError(
            f"stage {stage} ({layers}) has no parameters, so there is nothing to train there; cut "
            "elsewhere, or use fewer stages"
        )
