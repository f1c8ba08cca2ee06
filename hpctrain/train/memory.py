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
    in_root: bool = False
    """Whether it is gathered with the root: for the whole pass."""


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
    """What a rank holds at the fullest moment of backward, beyond its own and all activations:
    whole weights and gradients. Less than 0 where most shards of gradients are not there yet."""

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
        accumulates: bool = False,
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
            accumulates: Whether gradients of an earlier micro-batch are there during backward.

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
                accumulates,
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
        accumulates: bool,
    ) -> Memory:
        """A share of the state; of the gradients too; of the weights too, from step to step."""
        share = _share(optimizer_state, num_shards) + _share(averages, num_shards)
        if shard == "state":
            own, gathered = weights + gradients + share, _share(gradients, num_shards)
        else:
            own = _share(weights, num_shards) + _share(gradients, num_shards) + share
            gathered = _most_gathered(
                units, num_shards, frees=shard == "parameters", accumulates=accumulates
            )
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


def _most_gathered(
    units: Sequence[UnitSize], num_shards: int, *, frees: bool, accumulates: bool
) -> int:
    """The most that backward holds at a time, beyond what is held after it and all activations.

    A unit's backward begins with its weights and those of the unit before it, which are on their
    way already; all weights that are still to be used, where forward has not freed them. Its
    gradients come, whole, while its activations go: all of both are counted, for no order is known.
    Then its weights go, and its gradients are cut and laid out for the message, which is held until
    the next one is. Its shard of gradients has come. The root's weights and whole gradients stay to
    the end.

    Args:
        units: In the order of the forward pass.
        num_shards: How many ranks share them.
        frees: Whether forward frees weights, and backward gathers them again.
        accumulates: Whether all shards of gradients are there from an earlier micro-batch.
    """
    shards = sum(_share(unit.reduced, num_shards) for unit in units)
    root = sum(unit.weights for unit in units if unit.in_root)
    waiting = [unit.weights for unit in units if not unit.in_root]
    """Weights of units that backward has not reached; the next is the last."""
    most = root_gradients = sent = gone = 0
    there = shards if accumulates else 0
    for unit in reversed(units):
        held = root + sum(waiting[-2:] if frees else waiting)
        kept = root_gradients + there - gone
        if unit.in_root:
            root_gradients += unit.weights
            most = max(most, held + unit.weights + kept + sent)
        else:
            waiting.pop()
            end = held + unit.weights + sent
            # Its weights are gone and its gradients there, cut for the message, and the message.
            message = held + 2 * unit.reduced - unit.activations
            most = max(most, kept + end, kept + message)
            sent = unit.reduced
            there += 0 if accumulates else _share(unit.reduced, num_shards)
        gone += unit.activations
    last = root_gradients + sum(unit.reduced for unit in units if unit.in_root)
    return max(most, last + there - gone) - shards
