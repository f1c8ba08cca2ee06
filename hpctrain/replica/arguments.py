"""What `distribute` is given: the right kinds, and the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hpctrain.engines import AUTO, Engine
from hpctrain.errors import ConfigError
from hpctrain.optim import Several, members_of
from hpctrain.precision import (
    Casting,
    LossScaling,
    Precision,
    PrecisionName,
    ScaleAndClip,
    check_choice,
    check_parameters,
    excluded_from_clipping,
)
from hpctrain.replica.horovod_settings import HorovodTraining
from hpctrain.replica.naming import named_parameters
from hpctrain.replica.policy import Options
from hpctrain.sharding import sharding_of
from hpctrain.wire import wire_names
from hpctrain.world import World, agree

if TYPE_CHECKING:
    from hpctrain.grid import Grid

__all__ = [
    "DistributeArguments",
    "agree_on_arguments",
    "check_trained",
    "check_world",
    "choose_precision",
]

_REFUSED = {
    "SparseAdam": "it needs sparse gradients, and gradients are exchanged dense; use Adam or AdamW",
}
_HOROVOD = "horovod"
"""The engine that `horovod=` is about."""
_ORDER = "call distribute(world, model, optimizer)"


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributeArguments:
    """The options of `distribute`, as given; they are documented there."""

    accumulate: int
    overlap: bool | None
    bucket_bytes: int | None
    update: str
    share_parameters: bool
    wire: str
    timeout_s: float
    horovod: HorovodTraining | None
    precision: PrecisionName
    scaling: LossScaling | None
    clip_norm: float | None
    clip_value: float | None
    nonfinite: str
    averages_statistics: bool
    grid: Grid | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    shard_state: bool = False

    @property
    def is_in_stages(self) -> bool:
        """Whether ranks hold different parts of the model."""
        return self.grid is not None and self.grid.pipeline > 1

    @property
    def options(self) -> Options:
        """What of them the policy chooses by."""
        return Options(
            overlap=self.overlap,
            bucket_bytes=self.bucket_bytes,
            update=self.update,
            share_parameters=self.share_parameters,
            wire=self.wire,
            horovod_fusion=self.horovod is not None and self.horovod.fusion == "horovod",
            shard_state=self.shard_state,
        )


def check_world(world: object) -> None:
    """Refuse arguments without which the other ranks cannot be reached. Pure.

    Raises:
        ConfigError: it is not a world, or it is closed.
    """
    if not isinstance(world, World):
        raise ConfigError(
            f"distribute: the first argument is a {type(world).__name__}, and must be the world "
            f"that hpctrain.init() returned; {_ORDER}"
        )
    if world.has_ended:
        raise ConfigError(
            "distribute: this world is closed; distribute and train inside "
            "`with hpctrain.init() as world:`"
        )


def _find_mistake(
    model: object, optimizer: object, engine: object, given: DistributeArguments
) -> str | None:
    """What is wrong with this rank's arguments, or None. Pure."""
    mistake = _find_odd_part(model, optimizer)
    if mistake is not None:
        return mistake
    if not _is_count(given.accumulate):
        return f"accumulate={given.accumulate!r} must be a whole number, at least 1"
    if not (given.bucket_bytes is None or _is_count(given.bucket_bytes)):
        return f"bucket_bytes={given.bucket_bytes!r} must be a whole number, at least 1, or None"
    if not _is_flag(given.overlap):
        return f"overlap={given.overlap!r} must be True, False or None"
    if given.wire not in wire_names():
        return f"wire={given.wire!r} is unknown; choose {', '.join(wire_names())}"
    if given.nonfinite not in ("stop", "ignore"):
        return f"nonfinite={given.nonfinite!r} is unknown; choose 'stop' or 'ignore'"
    if not isinstance(engine, str | Engine):
        return f"engine={engine!r} must be a name such as 'auto', or an engine"
    return _find_horovod_mistake(engine, given)


def _find_odd_part(model: object, optimizer: object) -> str | None:
    """What cannot be trained, or None. Pure."""
    for name, value, kind in (
        ("model", model, torch.nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(value, kind):
            wanted = f"torch.{'nn' if name == 'model' else 'optim'}.{kind.__name__}"
            return f"the {name} is a {type(value).__name__}, and must be a {wanted}; {_ORDER}"
    unmade = _find_unmade(model)  # type: ignore[arg-type]
    if unmade is not None:
        return unmade
    members: tuple[object, ...] = members_of(optimizer)  # type: ignore[arg-type]
    for member in members:
        if not isinstance(member, torch.optim.Optimizer):
            return f"the list of optimizers has a {type(member).__name__} in it; {_ORDER}"
        refused = _REFUSED.get(type(member).__name__)
        if refused:
            return f"{type(member).__name__} cannot be distributed: {refused}"
    if isinstance(optimizer, Several):
        if not optimizer.members:
            return f"the list of optimizers is empty; {_ORDER}"
        for member in optimizer.members:
            if type(member).__name__ == "LBFGS":
                return "LBFGS evaluates the loss several times a step; it cannot be one of several"
    return None


def _find_unmade(model: torch.nn.Module) -> str | None:
    """A parameter or buffer that holds no numbers yet, and what to do, or None. Pure."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            return (
                f"{name} has no shape yet (a lazy module): run one batch through the model on "
                "every rank, make the optimizer after that, and then distribute"
            )
        if tensor.is_meta:
            return (
                f"{name} is on the meta device and has no values; call "
                "model.to_empty(device=world.device), initialize or load the weights, make the "
                "optimizer, and then distribute"
            )
    return None


def _find_horovod_mistake(engine: str | Engine, given: DistributeArguments) -> str | None:
    """What of the arguments does not go together with `horovod=`, or None. Pure."""
    settings = given.horovod
    if settings is None:
        return None
    name = engine if isinstance(engine, str) else engine.name
    if name not in (AUTO, _HOROVOD):
        return (
            f"horovod=HorovodTraining(...) on the {name} engine; use engine='horovod', or leave it "
            "out"
        )
    if settings.fusion == "horovod" and given.bucket_bytes is not None:
        return (
            f"bucket_bytes={given.bucket_bytes} with fusion='horovod', which has no buckets; use "
            "HorovodOptions(fusion_threshold_bytes=...), or fusion='arena'"
        )
    if not isinstance(engine, str) and settings.options is not None:
        return (
            "HorovodTraining: the engine already exists, so options come too late; give "
            "engine='horovod', so that Horovod starts with them"
        )
    return None


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def _describe_engine(engine: object) -> str:
    """A description of what must be the same of engines on all ranks. Pure."""
    return f"an engine over {engine.name}" if isinstance(engine, Engine) else str(engine)


def _describe_optimizer(optimizer: object, *, sizes: bool) -> str:
    """A description of what must be the same of optimizers on all ranks. Pure."""
    members: tuple[object, ...] = members_of(optimizer)  # type: ignore[arg-type]
    known = [member for member in members if isinstance(member, torch.optim.Optimizer)]
    groups = [group for member in known for group in member.param_groups]
    name = " + ".join(type(member).__name__ for member in members)
    if not sizes:  # stages have different ones
        return f"{name} ({len(groups)} groups)"
    return f"{name} (parameters in its groups: {', '.join(str(len(g['params'])) for g in groups)})"


def agree_on_arguments(
    world: World,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    engine: str | Engine,
    given: DistributeArguments,
    *,
    find_more: Callable[[torch.optim.Optimizer], str | None],
) -> str | Engine:
    """Collective: raise on all ranks when one's arguments are wrong, or not those of rank 0.

    Args:
        world: The ranks.
        model: What is to be trained.
        optimizer: Over its parameters.
        engine: A name, or an engine.
        given: The options.
        find_more: What else may be wrong with an optimizer that is one.

    Returns:
        The engine to use: with `horovod=` that is Horovod's where the caller left it open.

    Raises:
        ConfigError: with the rank and both values.
    """
    mistake = _find_mistake(model, optimizer, engine, given) or find_more(optimizer)
    agree(world.comm, mistake, error=ConfigError)
    must_match = {field.name: getattr(given, field.name) for field in fields(given)}
    del must_match["averages_statistics"]  # what each rank prints, not what it does
    must_match["engine"] = _describe_engine(engine)
    must_match["optimizer"] = _describe_optimizer(optimizer, sizes=not given.is_in_stages)
    mine = {name: v if isinstance(v, str) else repr(v) for name, v in must_match.items()}
    everyone: list[dict[str, str]] = world.comm.allgather(mine)
    for name, first in everyone[0].items():
        for rank, one in enumerate(everyone):
            if one[name] != first:
                raise ConfigError(
                    f"distribute: {name} is {first} on rank 0 and {one[name]} on rank {rank}; give "
                    "the same on every rank"
                )
    return _HOROVOD if engine == AUTO and given.horovod is not None else engine


def choose_precision(
    world: World,
    engine: Engine,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    precision: PrecisionName,
    scaling: LossScaling | None,
    clip_norm: float | None,
    clip_value: float | None,
) -> Precision:
    """Collective where norms are computed: see whether all ranks compute on the same hardware.

    Raises:
        ConfigError: values are out of range, or do not go together or with the model.
    """
    check_choice(
        precision,
        device_type=world.device.type,
        scaling=scaling,
        clip_norm=clip_norm,
        clip_value=clip_value,
    )
    check_trained(model, optimizer, precision=precision, clip_value=clip_value)
    spread = None
    scales = precision == "fp16"
    if (scales or clip_norm is not None) and len(set(world.comm.allgather(_hardware(world)))) > 1:

        def spread(norms: Tensor) -> object:
            return engine.broadcast_(norms, 0, what="norms of the gradients")

    scale_and_clip = ScaleAndClip(
        world,
        named_parameters(model, optimizer)[1][0].device,
        scaling=scaling or LossScaling() if scales else None,
        clip_norm=clip_norm,
        clip_value=clip_value,
        spread=spread,
    )
    sharding = sharding_of(model)
    if sharding is not None and precision == "bf16-pure":
        sharding.compute_in_bfloat16()
    return Precision(
        Casting(precision, world.device.type),
        scale_and_clip,
        model,
        optimizer,
        keeps_masters=sharding is None,
    )


def check_trained(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    precision: PrecisionName,
    clip_value: float | None,
) -> None:
    """Refuse parameters that cannot be trained or clipped so. Pure.

    Raises:
        ConfigError: the first of them, by name.
    """
    names, parameters = named_parameters(model, optimizer)
    unclipped = excluded_from_clipping(optimizer.param_groups)
    check_parameters(precision, names, parameters, clip_value, unclipped)


def _hardware(world: World) -> str:
    """What the last bit of a sum may depend on."""
    if world.device.type == "cuda":
        return str(torch.cuda.get_device_name(world.device))
    return str(torch.backends.cpu.get_cpu_capability())
