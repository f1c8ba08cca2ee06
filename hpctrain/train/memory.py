"""How much memory training takes: the one estimate, for plans and predictions. Pure, torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hpctrain.errors import ConfigError

__all__ = ["SHARDS", "Memory", "ShardLevel", "UnitSize"]

ShardLevel = Literal["none", "state", "gradients", "parameters"]
SHARDS: tuple[ShardLevel, ...] = get_args(ShardLevel)


class UnitSize(NamedTuple):
    """A part of the model whose weights are gathered together."""

    weights: int
    """Bytes of its whole weights in the format that is computed in."""
    reduced: int
    """Bytes of its whole gradients in the format that they are added up in."""
    activations: int = 0
    """Bytes that it keeps for backward, and drops before its gradients are added up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that follow from the model and its optimizer; activations come on top."""

    weights: int
    """Of one copy."""
    gradients: int
    optimizer_state: int
    """Of one copy, float32 masters of bfloat16 weights included."""
    averages: int
    """Of one copy of averaged weights; 0 where there are none."""
    per_rank: int
    """What is a rank's own."""
    per_node: int
    """What the fullest node holds: its ranks' private and shared memory."""
    gathered: int = 0
    """What a rank holds while it computes, on top of all activations: whole weights and gradients
    that are sharded."""

    @classmethod
    def estimate(
        cls,
        *,
        weights: int,
        gradients: int,
        optimizer_state: int,
        averages: int = 0,
        ranks_per_node: int,
        shares_memory: bool,
        shards_update: bool,
        share_parameters: bool = False,
        shard: ShardLevel = "none",
        num_shards: int = 1,
        units: Sequence[UnitSize] = (),
    ) -> Memory:
        """What docs/node.md says of shared memory, and one copy a rank of everything elsewhere.

        Args:
            weights: Bytes of one copy.
            gradients: Bytes of one copy.
            optimizer_state: Bytes of one copy.
            averages: Bytes of one copy.
            ranks_per_node: On the fullest node.
            shares_memory: Whether the ranks of a node add up in shared memory.
            shards_update: Whether they divide the update; only where they share memory.
            share_parameters: Whether they train one copy of the weights.
            shard: What each rank holds a share of; the levels contain each other.
            num_shards: How many ranks share it.
            units: What is gathered together, in the order of the forward pass.

        Raises:
            ConfigError: sharded weights in shared memory.
        """
        if shard != "none":
            if shares_memory:
                raise ConfigError(
                    f"shard={shard!r} divides over ranks, and shared memory over a node: one of the"
                    " two"
                )
            return cls._sharded(
                weights,
                gradients,
                optimizer_state,
                averages,
                ranks_per_node,
                shard,
                num_shards,
                units,
            )
        own, shared = weights + gradients + optimizer_state + averages, 0
        if shares_memory:
            own -= averages  # once a node, too
            shared = gradients + averages  # the sums, beside each rank's own
            if shards_update:
                own = (0 if share_parameters else weights) + gradients
                shared += gradients + optimizer_state  # the new weights and the state, once a node
        return cls(
            weights=weights,
            gradients=gradients,
            optimizer_state=optimizer_state,
            averages=averages,
            per_rank=own,
            per_node=own * ranks_per_node + shared,
        )

    @classmethod
    def _sharded(
        cls,
        weights: int,
        gradients: int,
        optimizer_state: int,
        averages: int,
        ranks_per_node: int,
        shard: ShardLevel,
        num_shards: int,
        units: Sequence[UnitSize],
    ) -> Memory:
        """A share of the state; of the gradients too; of the weights too, from step to step."""
        share = _share(optimizer_state, num_shards) + _share(averages, num_shards)
        if shard == "state":
            own, gathered = weights + gradients + share, _share(gradients, num_shards)
        else:
            own = _share(weights, num_shards) + _share(gradients, num_shards) + share
            whole = sum(unit.weights for unit in units)
            gathered = _most_gathered(units, keeps=whole if shard == "gradients" else None)
        return cls(
            weights=weights,
            gradients=gradients,
            optimizer_state=optimizer_state,
            averages=averages,
            per_rank=own,
            per_node=own * ranks_per_node,
            gathered=gathered,
        )


def _share(num_bytes: int, num_shards: int) -> int:
    return -(-num_bytes // num_shards)


def _most_gathered(units: Sequence[UnitSize], *, keeps: int | None) -> int:
    """The most that backward holds whole at a time, beyond all activations.

    A unit's backward begins with its weights and those of the unit before it, which are on their
    way already. It ends with its gradients, and the same laid out for the message; its activations
    are gone then, as are those of later units all the time. Where weights are kept from forward to
    backward (`keeps` bytes), nothing is on its way.
    """
    most = gone = 0
    for index in reversed(range(len(units))):
        unit = units[index]
        coming = units[index - 1].weights if index else 0
        held = unit.weights + coming if keeps is None else keeps
        end = held + unit.weights + unit.reduced - unit.activations
        most = max(most, max(held, end) - gone)
        gone += unit.activations
    return most
