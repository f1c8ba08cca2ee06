"""Training on a grid: what `distribute` is given with `grid=`, and modes of divided models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

import hpctrain.grid as grids
from hpctrain.errors import ConfigError
from hpctrain.optim import members_of
from hpctrain.pieces import is_sharded
from hpctrain.pipeline import SCHEDULES, PipelineRunner, StageModel, StageState
from hpctrain.replica.modes import (
    ArenaMode,
    GatherOrder,
    Partners,
    ShardedMode,
    SlicedMode,
    Stages,
    came_late,
    refuse_together,
)
from hpctrain.sharding import sharding_of
from hpctrain.tensor_parallel import division_of
from hpctrain.update import has_sliced_state, shards_by

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from hpctrain.engines import Engine
    from hpctrain.grid import Grid
    from hpctrain.precision import Precision
    from hpctrain.replica.arguments import DistributeArguments
    from hpctrain.sharding import Sharding
    from hpctrain.tensor_parallel import Division

__all__ = [
    "DataCompany",
    "build_partners",
    "build_sharded",
    "build_sliced",
    "build_stage",
    "build_stages",
    "find_grid_mistake",
]

_OF_PIPELINES = ("micro_batches", "schedule")
_OPTIONS = {
    "overlap": None,
    "bucket_bytes": None,
    "update": "auto",
    "share_parameters": False,
    "horovod": None,
    "wire": "none",
}
"""How gradients of a whole model are sent and applied, with what means nothing was asked for."""
_ELEMENTWISE = (
    "parts of a parameter are updated apart, and that needs an optimizer that treats every "
    "element alone, such as AdamW"
)
_PURE = (
    "distribute: precision='bf16-pure' is not for a model with divided layers; use precision='bf16'"
)


def find_grid_mistake(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    engine: object,
    given: DistributeArguments,
) -> str | None:
    """What is wrong with arguments for a grid or a divided model, or None. Pure."""
    grid, sharding, division = given.grid, sharding_of(model), division_of(model)
    if grid is None:
        if (
            sharding is not None
            or division is not None
            or given.shard_state
            or isinstance(model, StageModel)
        ):
            return (
                "distribute: this model was divided by split(grid, model); give the grid as well: "
                "distribute(world, model, optimizer, grid=grid)"
            )
        for name in _OF_PIPELINES:
            if getattr(given, name) is not None:
                return f"distribute: {name}={getattr(given, name)!r} needs grid= with a pipeline"
        return None
    odd: object = grid
    if odd == "auto":
        return (
            "distribute: grid='auto' comes too late: the grid decides how the model is divided; "
            "choose it first: chosen = hpctrain.auto_grid(world, build, loss_fn, x, y, "
            "optimizer=...), then split and distribute with what it says"
        )
    if not isinstance(odd, grids.Grid):
        return (
            f"distribute: grid={odd!r} must be the grid that hpctrain.Grid(world) made; call "
            "distribute(world, model, optimizer, grid=grid)"
        )
    if not isinstance(engine, str) or engine != "auto":
        return "distribute: engine= and grid= were both given; a grid brings its own engine"
    if isinstance(model, StageModel):
        odd = _find_odd_pipeline(grid, model, given) or _find_odd_stage(model, optimizer)
        if odd is None and sharding is not None:
            odd = _find_odd_optimizer(sharding, optimizer)
        return odd if odd is not None or division is None else _find_odd_kind(optimizer)
    parts = 1 if division is None else division.num_ranks
    undivided = [
        f"{name}=..."
        for name, number in (("stages", grid.pipeline), ("tensor", grid.tensor // parts))
        if number > 1
    ]
    if division is None and sharding is None and undivided:
        return (
            f"distribute: the grid has pipeline={grid.pipeline} and tensor={grid.tensor}, and the "
            f"model is whole; call split(grid, model, {', '.join(undivided)}) first, and make the "
            "optimizer over the parameters of what it returns"
        )
    if grid.pipeline > 1 or grid.tensor != parts:
        return (
            f"distribute: the grid has pipeline={grid.pipeline} and tensor={grid.tensor}, and the "
            f"model is divided into 1 and {parts}; give the grid that split() was given, or use "
            "Grid(world)"
        )
    for name in _OF_PIPELINES:
        if getattr(given, name) is not None:
            return (
                f"distribute: {name}={getattr(given, name)!r}, and the grid has no pipeline; leave "
                "it out, or use accumulate"
            )
    if sharding is None and division is None:
        return _find_odd_state(given) if given.shard_state else None
    if division is not None and given.precision == "bf16-pure":
        return _PURE
    odd = _find_option(given)
    if odd is None and sharding is not None:
        odd = _find_odd_optimizer(sharding, optimizer)
    elif odd is None:
        odd = _find_odd_kind(optimizer) or _find_odd_part(model, optimizer)
    return odd


def _first_option(given: DistributeArguments, but: Sequence[str] = ()) -> str | None:
    """The first option that says how gradients of a whole model are sent or applied, or None."""
    for name, default in _OPTIONS.items():
        if name not in but and getattr(given, name) != default:
            return name
    return None


def _find_odd_state(given: DistributeArguments) -> str | None:
    """An option that does not go together with shard="state"."""
    allowed = ("bucket_bytes",) if given.overlap else ("bucket_bytes", "overlap")
    found = _first_option(given, but=allowed)
    if found is not None:
        return (
            f"distribute: {found}={getattr(given, found)!r} with shard='state', where gradients "
            "are sent after backward and each rank updates a part of the weights; leave it out"
        )
    if given.precision == "bf16-pure":
        return (
            "distribute: precision='bf16-pure' keeps float32 masters of all weights on every rank, "
            "and shard='state' divides them; use precision='bf16'"
        )
    return None


def _find_option(given: DistributeArguments) -> str | None:
    """An option that a divided model has no use for."""
    found = _first_option(given)
    if found is None:
        return None
    return (
        f"distribute: {found}={getattr(given, found)!r} with a model that split() has divided: "
        "each rank updates what it holds, and how gradients are sent follows from that; leave it "
        "out"
    )


def _find_odd_pipeline(
    grid: Grid,
    model: StageModel,
    given: DistributeArguments,
) -> str | None:
    """What is wrong with arguments for a model in stages, or None."""
    num_stages, micro_batches = model.hpctrain_cut.num_stages, given.micro_batches
    if num_stages != grid.pipeline:
        return (
            f"distribute: the model was cut into {num_stages} stages, and this grid has "
            f"pipeline={grid.pipeline}; give the grid that it was cut on"
        )
    if micro_batches is None:
        return (
            "distribute: a pipeline needs micro_batches=, the number of parts that a batch is cut "
            f"into; take at least {4 * num_stages}, 4 for each stage"
        )
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        return f"distribute: micro_batches={micro_batches!r} must be a whole number, at least 1"
    if given.schedule is not None and given.schedule not in SCHEDULES:
        return f"distribute: schedule={given.schedule!r} is unknown; choose {_SCHEDULES}"
    found = _first_option(given)
    if found is not None:
        value = getattr(given, found)
        return f"distribute: {found}={value!r} is not for a model in stages; leave it out"
    if given.precision == "bf16-pure":
        return (
            "distribute: precision='bf16-pure' is not for a model in stages; use precision='bf16'"
        )
    return None


def _find_odd_stage(model: StageModel, optimizer: torch.optim.Optimizer) -> str | None:
    """An optimizer that cannot be a stage's, or None."""
    if any(type(member).__name__ == "LBFGS" for member in members_of(optimizer)):
        return "distribute: LBFGS evaluates the loss several times a step; a pipeline cannot"
    own = {id(p) for p in model.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        return (
            "distribute: the optimizer has parameters that are not this stage's; make it over the "
            "parameters of what split() returned"
        )
    return None


_SCHEDULES = " or ".join(map(repr, SCHEDULES))


class DataCompany(NamedTuple):
    """The ranks along the data dimension: they hold the same stage and parts of layers."""

    comm: Comm

    @property
    def rank(self) -> int:
        """This one's data coordinate."""
        return int(self.comm.Get_rank())


def build_stage(
    engine: Engine,
    model: StageModel,
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
) -> ArenaMode:
    """The mode of a stage that each of its data ranks holds whole."""
    mode = ArenaMode(engine, names, parameters, bucket_bytes=None, overlap=False)
    num_stages = model.hpctrain_cut.num_stages
    mode.chosen = f"pipeline: split() has cut the model into {num_stages} stages"
    return mode


def build_stages(
    grid: Grid,
    model: StageModel,
    given: DistributeArguments,
    numerics: Precision,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
) -> Stages:
    """Collective: the stages of a model that `split` has cut, to be carried by a mode."""
    casting = numerics.casting
    sharding = sharding_of(model)
    is_last = grid.coordinate.pipeline == grid.pipeline - 1

    def call(module: torch.nn.Module, arguments: tuple[Any, ...]) -> Any:
        if is_last:
            return casting.forward(module, arguments, {})
        with casting.autocast():
            return module(*arguments)

    runner = PipelineRunner(
        grid,
        model,
        micro_batches=given.micro_batches or 1,
        schedule=given.schedule or "1f1b",
        call=call,
        gathered=None if sharding is None else sharding.gathered,
    )
    return Stages(runner, StageState(grid.comm("pipeline"), model, optimizer), parameters)


def _find_odd_part(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """A parameter of an optimizer that is none of the divided model's, or one that came late."""
    late = next((name for name, p in model.named_parameters() if not is_sharded(p)), None)
    if late is not None:
        return f"distribute: {came_late(late)}"
    own = {id(p) for p in model.parameters() if is_sharded(p)}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                return _stranger(number, place, parameter)
    return None


def _stranger(number: int, place: int, parameter: torch.Tensor) -> str:
    return (
        f"distribute: parameter {place} of group {number} of the optimizer, of shape "
        f"{tuple(parameter.shape)}, is not a parameter of the divided model: the optimizer was "
        "made before split(), or the parameter came later or belongs to another module; call "
        "split(grid, model) when the model is complete, and make the optimizer over "
        "model.parameters() afterwards"
    )


def _find_odd_optimizer(sharding: Sharding, optimizer: torch.optim.Optimizer) -> str | None:
    """An optimizer that cannot be over shards, or is not."""
    return _find_odd_kind(optimizer) or _find_odd_shard(sharding, optimizer)


def _find_odd_kind(optimizer: torch.optim.Optimizer) -> str | None:
    """An optimizer that does not treat each element alone, or comes with a state."""
    for member in members_of(optimizer):
        by, why = shards_by(member)
        if by != "element":
            return f"distribute: {why}; {_ELEMENTWISE}"
        if any(member.state.values()):
            return (
                f"distribute: this {type(member).__name__} has a state already, which may be that "
                "of a whole model; load it by replica.load_state_dict(state) after distribute"
            )
    return None


def _find_odd_shard(sharding: Sharding, optimizer: torch.optim.Optimizer) -> str | None:
    """A parameter of an optimizer that is none of the sharded model's."""
    shards = sharding.shards()
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in shards:
                return _stranger(number, place, parameter)
    return None


def build_sharded(
    engine: Engine,
    sharding: Sharding,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    comm: Comm,
) -> ShardedMode:
    """Collective: the mode of a model that `split` has sharded; `comm` has the engine's ranks.

    Raises:
        ConfigError: the optimizer has come by parameters that are not shards.
    """
    trouble = _find_odd_shard(sharding, optimizer)
    if trouble is not None:
        raise ConfigError(trouble)
    late = engine.device.type != "cpu" and engine.size > 1
    order = GatherOrder(engine, comm) if late else None
    mode = ShardedMode(engine, names, parameters, sharding, optimizer, order)
    mode.chosen = f"sharded: split() was asked for shard={sharding.kind!r}"
    if sharding.in_stages:
        mode.chosen += ", within each stage"
    return mode


def build_partners(
    grid: Grid,
    model: torch.nn.Module,
    division: Division,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
) -> Partners:
    """Collective at the grid's first call: the ranks that share the layers of a model.

    Raises:
        ConfigError: on all ranks; the optimizer has come by parameters that are not the model's,
            or the model has come by some that are not divided.
    """
    everyone = grid.engine(*grids.DIMENSIONS)
    refuse_together(everyone, _find_odd_part(model, optimizer))
    elsewhere: frozenset[int] = frozenset()
    if grid.coordinate.tensor > 0:  # what all of them hold whole, the first one counts
        elsewhere = frozenset(
            index
            for index, parameter in enumerate(parameters)
            if not cast("Any", parameter).placements[-1].is_shard()
        )
    return Partners(grid.engine("tensor"), everyone, model, division, elsewhere)


def build_sliced(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    *,
    bucket_bytes: int | None,
) -> SlicedMode:
    """The mode of a model whose optimizer's state `split` was asked to divide.

    Raises:
        ConfigError: the optimizer's state was divided otherwise before.
    """
    if has_sliced_state(optimizer):
        raise ConfigError(
            "the optimizer's state is in slices of other parameters, or of a replica that was "
            "closed; with shard='state' parameters cannot be added, converted or removed after "
            "the first step: save a checkpoint, and resume with a new optimizer"
        )
    return SlicedMode(engine, names, parameters, optimizer, bucket_bytes=bucket_bytes)
