"""What `distribute` and `backward` are given: the right kinds, and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor

from hpctrain.engines import Engine
from hpctrain.errors import ConfigError
from hpctrain.optim import Several, members_of
from hpctrain.world import World, agree

__all__ = [
    "agree_on_arguments",
    "check_loss",
    "check_world",
    "describe_engine",
    "describe_optimizer",
    "find_trouble",
]

_REFUSED = {
    "SparseAdam": "it needs sparse gradients, and gradients travel dense; use Adam or AdamW",
}
_ORDER = "call distribute(world, model, optimizer)"


def check_world(world: object) -> None:
    """Refuse what cannot even ask the other ranks. Pure.

    Raises:
        ConfigError: it is no world, or its block has ended.
    """
    if not isinstance(world, World):
        raise ConfigError(
            f"distribute: the first argument is a {type(world).__name__}, and must be the world "
            f"that hpctrain.init() made; {_ORDER}"
        )
    if world.has_ended:
        raise ConfigError(
            "distribute: this world's block has ended; distribute and train inside "
            "`with hpctrain.init() as world:`"
        )


def find_trouble(
    model: object,
    optimizer: object,
    *,
    accumulate: object,
    overlap: object,
    bucket_bytes: object,
    engine: object,
    nonfinite: object,
) -> str | None:
    """What is wrong with this rank's arguments, or None. Pure."""
    for name, value, kind in (
        ("model", model, torch.nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(value, kind):
            wanted = f"torch.{'nn' if name == 'model' else 'optim'}.{kind.__name__}"
            return f"the {name} is a {type(value).__name__}, and must be a {wanted}; {_ORDER}"
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
    if not _is_count(accumulate):
        return f"accumulate={accumulate!r} must be a whole number, at least 1"
    if not (bucket_bytes is None or _is_count(bucket_bytes)):
        return f"bucket_bytes={bucket_bytes!r} must be a whole number, at least 1, or None"
    if not (overlap is None or isinstance(overlap, bool)):
        return f"overlap={overlap!r} must be True, False or None"
    if nonfinite not in ("stop", "ignore"):
        return f"nonfinite={nonfinite!r} is unknown; choose 'stop' or 'ignore'"
    if not isinstance(engine, str | Engine):
        return f"engine={engine!r} must be a name such as 'auto', or an engine"
    return None


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def describe_engine(engine: object) -> str:
    """What must be the same of engines on all ranks, in words. Pure."""
    return f"an engine over {engine.name}" if isinstance(engine, Engine) else str(engine)


def describe_optimizer(optimizer: object) -> str:
    """What must be the same of optimizers on all ranks, in words. Pure."""
    members: tuple[object, ...] = members_of(optimizer)  # type: ignore[arg-type]
    known = [member for member in members if isinstance(member, torch.optim.Optimizer)]
    sizes = [str(len(group["params"])) for member in known for group in member.param_groups]
    name = " + ".join(type(member).__name__ for member in members)
    return f"{name} (parameters in its groups: {', '.join(sizes)})"


def agree_on_arguments(world: World, trouble: str | None, given: Mapping[str, object]) -> None:
    """Collective: raise on all ranks when one's arguments are wrong, or not those of rank 0.

    Args:
        world: The ranks.
        trouble: What is wrong on this rank, or None.
        given: What must match, by name.

    Raises:
        ConfigError: with the rank and both values.
    """
    agree(world.comm, trouble, error=ConfigError)
    mine = {name: value if isinstance(value, str) else repr(value) for name, value in given.items()}
    everyone: list[dict[str, str]] = world.comm.allgather(mine)
    for name, first in everyone[0].items():
        for rank, one in enumerate(everyone):
            if one[name] != first:
                raise ConfigError(
                    f"distribute: {name} is {first} on rank 0 and {one[name]} on rank {rank}; give "
                    "the same on every rank"
                )


def check_loss(loss: object) -> None:
    """Refuse what cannot be differentiated. Pure.

    Raises:
        ConfigError: it is no tensor, or not one number.
    """
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"backward: the loss is a {type(loss).__name__} ({loss!r}), and must be the tensor "
            "that the loss function gave, before .item() or float()"
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"the loss has shape {tuple(loss.shape)}; reduce it to one number, a mean over the "
            "samples"
        )
