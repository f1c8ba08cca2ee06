"""Whether the ranks of a node share memory, and whether they divide the update among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpctrain.errors import ConfigError
from hpctrain.fusion import is_dense
from hpctrain.optim import spans_of
from hpctrain.replica.modes import NodeMode
from hpctrain.update import ShardedUpdate, shards_by

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.world import World

__all__ = ["ChosenUpdate", "choose_update", "make_node_mode", "shares_memory"]

UPDATES = ("auto", "sharded", "replicated")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenUpdate:
    """How weights are updated, and why."""

    by: str | None
    """`element`, `parameter`, or None for everything on every rank."""
    why: str


def shares_memory(
    world: World, engine: Engine, *, overlap: bool | None, bucket_bytes: int | None
) -> bool:
    """Whether gradients meet in shared memory: the `mpi` engine, CPUs, several ranks on a node.

    The same on every rank. Asking for overlap or for buckets asks for messages.
    """
    memory = engine.capabilities.shares_memory and engine.device.type == "cpu"
    if not memory or engine.size == 1:
        return False
    if overlap or bucket_bytes is not None:
        return False
    return bool(max(engine.node_group().local_sizes) > 1)


def choose_update(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    *,
    update: str,
    shared: bool,
    masters: bool = False,
    alone: bool = False,
) -> ChosenUpdate:
    """Decide how weights are updated. Pure.

    Args:
        optimizer: The user's.
        names: Of its parameters.
        parameters: Themselves.
        update: What was asked for.
        shared: Whether gradients meet in shared memory.
        masters: Whether weights have float32 masters, which are each rank's own.
        alone: Whether there is one rank only, whose share is everything.

    Raises:
        ConfigError: what was asked for is unknown, or cannot be.
    """
    if update not in UPDATES:
        raise ConfigError(f"update={update!r} is unknown; choose {', '.join(UPDATES)}")
    by, why = shards_by(optimizer)
    scattered = [name for name, p in zip(names, parameters, strict=True) if not is_dense(p)]
    if update == "replicated":
        return ChosenUpdate(by=None, why="asked for")
    if alone:
        return ChosenUpdate(by=None, why="there is one rank")
    if not shared:
        by, why = None, "gradients do not meet in shared memory here"
    elif masters:
        by, why = None, "float32 masters of bfloat16 weights are each rank's own"
    elif scattered:
        by, why = None, f"{scattered[0]} does not lie in one piece of memory"
    if update == "sharded":
        if by is None:
            raise ConfigError(
                f'update="sharded" cannot be: {why}; pass update="auto" or "replicated"'
            )
        return ChosenUpdate(by=by, why=f"asked for; {why}")
    if by is not None and not _has_state(optimizer):
        return ChosenUpdate(
            by=None, why="the optimizer keeps no state: moving weights would cost what it saves"
        )
    return ChosenUpdate(by=by, why=why)


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is something to hold once a node; plain SGD has nothing."""
    plain = type(optimizer) is torch.optim.SGD
    return not plain or any(group.get("momentum", 0) for group in optimizer.param_groups)


def make_node_mode(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    chosen: Sequence[ChosenUpdate],
    *,
    share_parameters: bool,
) -> NodeMode:
    """Collective: gradients in shared memory, and the updates divided that are so chosen."""
    group = engine.node_group()
    mode = NodeMode(engine, group, names, parameters)
    for (member, span), one in zip(spans_of(optimizer), chosen, strict=True):
        if one.by is not None:
            mode.updates.append(
                ShardedUpdate(
                    engine,
                    group,
                    member,
                    names[span],
                    parameters[span],
                    mode.views[span],
                    by=one.by,
                    share_weights=share_parameters,
                )
            )
    mode.why_update = "; ".join(one.why for one in chosen)
    return mode
