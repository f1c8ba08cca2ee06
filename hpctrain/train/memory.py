"""How much memory training takes: the one estimate, for plans and predictions. Pure, torch-free."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Memory"]


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
        """
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
