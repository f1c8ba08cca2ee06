"""What the policy must know of a world, an engine, a model and its optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hpctrain.fusion import is_dense
from hpctrain.optim import spans_of
from hpctrain.replica.policy import OptimizerFacts, Options, ReplicaFacts, may_share_memory
from hpctrain.update import shards_by

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.world import World

__all__ = ["gather_facts", "optimizer_facts"]


def gather_facts(
    world: World,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    *,
    options: Options,
    has_masters: bool,
) -> ReplicaFacts:
    """Collective at an engine's first call: the facts, the same on every rank.

    Which ranks share memory is looked up only where it matters: finding out makes communicators.

    Args:
        world: The ranks.
        engine: What connects them.
        optimizer: The user's, or several as one.
        names: Of its parameters.
        parameters: Themselves.
        options: What was asked for.
        has_masters: Whether weights have float32 masters.
    """
    matters = may_share_memory(engine.capabilities, engine.device.type, engine.size, options)
    return ReplicaFacts(
        num_ranks=engine.size,
        num_nodes=world.num_nodes,
        sharing_ranks=max(engine.node_group().local_sizes) if matters else 1,
        device_type=engine.device.type,
        engine=engine.capabilities,
        gradient_bytes=sum(p.numel() * p.element_size() for p in parameters),
        optimizers=tuple(
            optimizer_facts(member, names[span], parameters[span])
            for member, span in spans_of(optimizer)
        ),
        has_masters=has_masters,
        has_spare_cores=world.num_spare_cores > 0,
    )


def optimizer_facts(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
) -> OptimizerFacts:
    """What matters of an optimizer and its parameters. Pure.

    Raises:
        ConfigError: its class says what is unknown of how it may be divided.
    """
    by, why = shards_by(optimizer)
    scattered = (name for name, p in zip(names, parameters, strict=True) if not is_dense(p))
    return OptimizerFacts(
        shards_by=by,
        why=why,
        keeps_state=_keeps_state(optimizer),
        scattered=next(scattered, None),
    )


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is something to hold once a node; plain SGD has nothing."""
    plain = type(optimizer) is torch.optim.SGD
    return not plain or any(group.get("momentum", 0) for group in optimizer.param_groups)
