"""`reshuffle`: new data on every rank for the next epoch."""

from __future__ import annotations

from hpctrain.data.shard import Shard
from hpctrain.errors import ConfigError
from hpctrain.world import World, agree

__all__ = ["reshuffle"]


def reshuffle(world: World, shard: Shard, *, epoch: int | None = None) -> Shard:
    """Collective: exchange samples between ranks so that the shares follow another epoch's order.

    Memory: the old share, the new one and one chunk.

    Args:
        world: The ranks that the data were scattered to.
        shard: What `scatter` gave; it is changed in place.
        epoch: Whose order to follow, the same on all ranks; None takes the next.

    Returns:
        The same shard.

    Raises:
        ConfigError: on all ranks, when the data were scattered in their own order, or `epoch` is
            negative.
    """
    trouble = None
    if shard.order.kind == "stored":
        trouble = "the data were scattered with shuffle=False, so every epoch has the same order"
    elif epoch is not None and epoch < 0:
        trouble = f"epoch={epoch} must not be negative"
    agree(world.comm, trouble and f"reshuffle: {trouble}", error=ConfigError)
    shard.reorder(shard.order.of_epoch(shard.order.epoch + 1 if epoch is None else epoch))
    return shard
