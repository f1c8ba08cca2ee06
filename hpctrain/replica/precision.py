"""Which precision a replica gets from the arguments of `distribute`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
from hpctrain.replica.naming import named_parameters

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.world import World

__all__ = ["check_trained", "choose_precision"]


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
    return Precision(Casting(precision, world.device.type), scale_and_clip, model, optimizer)


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
